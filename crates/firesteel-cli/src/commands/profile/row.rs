//! A row of a table of layer times, from a measurement or an import.

use crate::printer::Printer;
use crate::source::{ModelSource, read_text};
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_checkpoint::{ModelConfig, StagedFile};
use firesteel_profile::{LayerShape, Measurement, Origin, PartKind, RunTimes, Statistic, Table};
use firesteel_step::CacheLayout;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The table, and what of a step the row is.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct RowArgs {
    /// Table of layer times that gets a row; a file that does not exist is created
    #[arg(long, value_name = "TABLE")]
    pub(crate) out: Option<PathBuf>,
    /// The model: shape (spark-x2.5-1.7b, spark-x2.5-4b), config.json, checkpoint folder or GGUF
    /// file
    #[arg(long, value_name = "NAME|PATH", requires = "out")]
    model: Option<String>,
    /// Number format, as fp16 or w8a16
    #[arg(long, value_name = "NAME", requires = "out")]
    precision: Option<String>,
    /// Spelling of the graph, as qnn or portable
    #[arg(long, value_name = "NAME", requires = "out")]
    dialect: Option<String>,
    /// The part of a step
    #[arg(long, value_enum, requires = "out")]
    layer_kind: Option<LayerKindArg>,
    /// Cache layout of the layer
    #[arg(long, value_enum, requires = "out")]
    layout: Option<LayoutArg>,
    /// Entries of a full layer's cache
    #[arg(long, value_name = "N", requires = "out")]
    context: Option<usize>,
    /// Tokens of the step [default: 1]
    #[arg(long, value_name = "T", requires = "out")]
    tokens: Option<usize>,
    /// In what the graph differs from the plain one; such a row is never part of a composition
    #[arg(long, value_name = "NAME", requires = "out")]
    variant: Option<String>,
    /// Only the time is right: the build computes something else than the layer
    #[arg(long, requires = "out")]
    timing_only: bool,
    /// What else is to be known of the number
    #[arg(long, value_name = "TEXT", requires = "out")]
    note: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LayerKindArg {
    /// A sliding layer with a full window
    Sliding,
    /// A full layer
    Full,
    /// Final norm and head
    Head,
    /// Several layers in one graph, which --variant names
    Block,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LayoutArg {
    /// The host writes new entries into the slots of the oldest
    Ring,
    /// The graph appends and drops, or the cache grows by position
    Roll,
}

/// A measured time and where it is from.
pub(crate) struct NewRow<'a> {
    pub(crate) device: String,
    pub(crate) soc: String,
    pub(crate) runtime: String,
    pub(crate) origin: Origin,
    /// Who measured it, how and when.
    pub(crate) text: String,
    pub(crate) runs: &'a RunTimes,
    pub(crate) known: Known,
}

/// What of a row is known from elsewhere than the command line.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    pub(crate) config: Option<ModelConfig>,
    pub(crate) precision: Option<String>,
    pub(crate) dialect: Option<String>,
    pub(crate) kind: Option<PartKind>,
    pub(crate) layout: Option<CacheLayout>,
    pub(crate) context: Option<usize>,
    pub(crate) tokens: Option<usize>,
    pub(crate) variant: Option<String>,
    pub(crate) timing_only: bool,
}

impl RowArgs {
    /// Adds a row to the table, which is replaced as a whole; options fill what is not known.
    pub(crate) fn write(
        &self,
        new: NewRow<'_>,
        printer: &mut Printer,
    ) -> anyhow::Result<Measurement> {
        let NewRow { device, soc, runtime, origin, text, runs, known } = new;
        let out = self.out.as_deref().context("--out names the table")?;
        let missing = |option: &str| {
            format!("a row of {} needs {option}, which the file does not say", out.display())
        };
        let config = match (known.config, &self.model) {
            (Some(config), _) => config,
            (None, Some(model)) => {
                let source = ModelSource::named(model)?;
                for warning in &source.warnings {
                    printer.warn(warning);
                }
                source.config
            }
            (None, None) => bail!(missing("--model")),
        };
        let given = |known: Option<String>, option: &Option<String>| known.or(option.clone());
        let precision = given(known.precision, &self.precision);
        let kind = known.kind.or(self.layer_kind.map(|kind| match kind {
            LayerKindArg::Sliding => PartKind::Sliding,
            LayerKindArg::Full => PartKind::Full,
            LayerKindArg::Head => PartKind::Head,
            LayerKindArg::Block => PartKind::Block,
        }));
        let layout = known.layout.or(self.layout.map(|layout| match layout {
            LayoutArg::Ring => CacheLayout::Ring,
            LayoutArg::Roll => CacheLayout::Roll,
        }));
        let row = runs.fill(Measurement {
            runtime,
            precision: precision.with_context(|| missing("--precision"))?,
            dialect: given(known.dialect, &self.dialect),
            kind: kind.with_context(|| missing("--layer-kind"))?,
            layout,
            context: known.context.or(self.context),
            tokens: known.tokens.or(self.tokens).unwrap_or(1),
            variant: given(self.variant.clone(), &known.variant),
            ms: 0.0,
            statistic: Statistic::Unstated,
            low: None,
            high: None,
            n: None,
            snr_db: None,
            timing_only: self.timing_only || known.timing_only,
            source: String::new(),
            note: self.note.clone(),
        });
        let shape = LayerShape::of(&config);
        let before = match out.exists() {
            true => Table::from_json(out, read_text(out)?.as_bytes())?,
            false => Table::new(device.clone(), soc.clone(), shape),
        };
        before.require_shape(&config).with_context(|| out.display().to_string())?;
        for (what, has, given) in [("device", &before.device, &device), ("soc", &before.soc, &soc)]
        {
            if has != given {
                bail!(
                    "{} is a table of the {what} {has:?}, and this is of {given:?}; a table has one",
                    out.display()
                );
            }
        }
        let table = before.add(out, (origin, text), row)?;
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
