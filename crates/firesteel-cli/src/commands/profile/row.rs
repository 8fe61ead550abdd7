//! A row of a table of layer times, from a measurement or an import.

use crate::printer::Printer;
use crate::texts::read_text;
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_checkpoint::{ModelConfig, StagedFile};
use firesteel_profile::{LayerShape, Measurement, Origin, PartKind, RunTimes, Statistic, Table};
use firesteel_step::CacheLayout;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The table, and what of a row only its author knows.
#[derive(Debug, Clone, Args)]
pub(crate) struct RowArgs {
    /// Table of layer times that gets a row; a file that does not exist is created
    #[arg(long, value_name = "TABLE")]
    pub(crate) out: Option<PathBuf>,
    /// Number format, as fp16 or w8a16
    #[arg(long, value_name = "NAME", requires = "out")]
    pub(crate) precision: Option<String>,
    /// In what the graph differs from the plain one; such a row is never part of a composition
    #[arg(long, value_name = "NAME", requires = "out")]
    pub(crate) variant: Option<String>,
    /// What else is to be known of the number
    #[arg(long, value_name = "TEXT", requires = "out")]
    note: Option<String>,
}

/// A measured time, of what, and where it is from. What [`RowArgs`] says too is what is known
/// where it is silent.
pub(crate) struct NewRow<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) device: String,
    pub(crate) soc: String,
    pub(crate) runtime: String,
    pub(crate) precision: Option<String>,
    pub(crate) dialect: Option<String>,
    pub(crate) kind: PartKind,
    pub(crate) layout: Option<CacheLayout>,
    pub(crate) context: Option<usize>,
    pub(crate) tokens: usize,
    pub(crate) variant: Option<String>,
    pub(crate) timing_only: bool,
    pub(crate) runs: &'a RunTimes,
    pub(crate) origin: Origin,
    /// Who measured it, how and when.
    pub(crate) text: String,
}

impl RowArgs {
    /// Adds a row to the table at `out`, which is replaced as a whole.
    pub(crate) fn write(
        &self,
        out: &Path,
        new: NewRow<'_>,
        printer: &mut Printer,
    ) -> anyhow::Result<Measurement> {
        let NewRow { config, device, soc, .. } = new;
        let precision = self.precision.clone().or(new.precision);
        let row = new.runs.fill(Measurement {
            runtime: new.runtime,
            precision: precision.with_context(|| missing(out, "--precision"))?,
            dialect: new.dialect,
            kind: new.kind,
            layout: new.layout,
            context: new.context,
            tokens: new.tokens,
            variant: self.variant.clone().or(new.variant),
            ms: 0.0,
            statistic: Statistic::Unstated,
            low: None,
            high: None,
            n: None,
            snr_db: None,
            timing_only: new.timing_only,
            source: String::new(),
            note: self.note.clone(),
        });
        let before = match out.exists() {
            true => Table::from_json(out, read_text(out)?.as_bytes())?,
            false => Table::new(device.clone(), soc.clone(), LayerShape::of(config)),
        };
        before.require_shape(config).with_context(|| out.display().to_string())?;
        for (what, has, given) in [("device", &before.device, &device), ("soc", &before.soc, &soc)]
        {
            if has != given {
                bail!(
                    "{} is a table of the {what} {has:?}, and this is of {given:?}; a table has one",
                    out.display()
                );
            }
        }
        let table = before.add(out, (new.origin, new.text), row)?;
        let row = table.measurements.last().cloned().context("a table with a row has a row")?;
        let ours: fn(&Path) -> io::Result<bool> = |path| Ok(path.is_file());
        let staged = StagedFile::create(out, Some(ours))?;
        let mut file = staged.file();
        file.write_all(table.to_json()?.as_bytes())?;
        staged.commit()?;
        printer.talk(&format!(
            "{}: {} row{} of {}",
            out.display(),
            table.measurements.len(),
            if table.measurements.len() == 1 { "" } else { "s" },
            table.device
        ));
        Ok(row)
    }
}

/// What to say of an option that a row needs and nothing else tells.
pub(crate) fn missing(out: &Path, option: &str) -> String {
    format!("a row of {} needs {option}, which is not known otherwise", out.display())
}

/// The times of some runs for a reader.
pub(crate) fn times_line(runs: &RunTimes) -> String {
    let part = |name: &str, value: Option<f64>| {
        value.map_or_else(String::new, |ms| format!(", {name} {ms:.3}"))
    };
    let what = match runs.statistic {
        Statistic::Median => "median ",
        Statistic::Mean => "mean ",
        Statistic::Unstated => "",
    };
    format!(
        "{what}{:.3} ms{}{}{}{}{}{}",
        runs.ms,
        part("shortest", runs.low),
        part("p10", runs.p10),
        part("p90", runs.p90),
        part("longest", runs.high),
        part("median deviation", runs.median_deviation),
        match runs.n {
            Some(n) => format!(", {n} runs"),
            None => ", what it stands for and of how many runs is not said".into(),
        }
    )
}
