use super::row::{NewRow, RowArgs, missing, times_line};
use crate::printer::{Printer, table};
use firesteel_model::ModelShape;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use firesteel_profile::{
    ImportedReport, Measurement, OperatorTimes, Origin, PartKind, Quantity, REPORT_LIMIT,
    ReportFormat, import_report,
};
use firesteel_step::CacheLayout;
use serde::Serialize;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Read what another tool reports of a run on a device.
///
/// Profiles of Qualcomm AI Hub (JSON), traces of ONNX Runtime (JSON) and profiling events of QNN
/// (CSV, of ONNX Runtime's QNN provider or of qnn-profile-viewer). With --out the time of the whole
/// graph becomes a row of a table for `profile compose`, marked as imported; what was measured and
/// on which device is not in these files and is yours to say. Cycles of the emulator are refused:
/// they are those of a host.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// ImportedReport
    file: PathBuf,
    /// Who wrote it [default: seen from its beginning]
    #[arg(long, value_enum, default_value_t = Format::Auto)]
    format: Format,
    /// First runs to leave out
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: usize,
    /// Most operators to print, the longest first
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    #[command(flatten)]
    row: RowArgs,
    #[command(flatten)]
    part: PartArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// What the file begins like
    Auto,
    /// A profile of Qualcomm AI Hub
    AiHub,
    /// A trace of ONNX Runtime
    Ort,
    /// Profiling events of QNN
    QnnCsv,
}

/// What was measured, which no report says.
#[derive(Debug, Args)]
struct PartArgs {
    /// Device that was measured
    #[arg(long, value_name = "NAME", requires = "out")]
    device: Option<String>,
    /// Its system on a chip
    #[arg(long, value_name = "NAME", requires = "out")]
    soc: Option<String>,
    /// Runtime and unit, as qnn-npu
    #[arg(long, value_name = "NAME", requires = "out")]
    runtime: Option<String>,
    /// The model: shape (a preset of `synth`), config.json, checkpoint folder or GGUF
    /// file
    #[arg(long, value_name = "NAME|PATH", requires = "out")]
    model: Option<String>,
    /// Spelling of the graph, as qnn or portable
    #[arg(long, value_name = "NAME", requires = "out")]
    dialect: Option<String>,
    /// The part of a step
    #[arg(long, value_enum, requires = "out")]
    layer_kind: Option<Kind>,
    /// Cache layout of the layer
    #[arg(long, value_enum, requires = "out")]
    layout: Option<RowLayout>,
    /// Entries of a full layer's cache
    #[arg(long, value_name = "N", requires = "out")]
    context: Option<usize>,
    /// Tokens of the step
    #[arg(long, value_name = "T", requires = "out", default_value_t = 1)]
    tokens: usize,
    /// Only the time is right: the build computes something else than the layer
    #[arg(long, requires = "out")]
    timing_only: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
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
enum RowLayout {
    /// The host writes new entries into the slots of the oldest
    Ring,
    /// The graph appends and drops, or the cache grows by position
    Roll,
}

/// What the file says, and the row that it became.
#[derive(Debug, Serialize)]
struct Outcome<'a> {
    file: &'a Path,
    #[serde(flatten)]
    report: &'a ImportedReport,
    row: Option<Measurement>,
}

impl Import {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let format = match self.format {
            Format::Auto => None,
            Format::AiHub => Some(ReportFormat::AiHub),
            Format::Ort => Some(ReportFormat::Ort),
            Format::QnnCsv => Some(ReportFormat::QnnCsv),
        };
        let mut bytes = Vec::new();
        fs_err::File::open(&self.file)?.take(REPORT_LIMIT + 1).read_to_end(&mut bytes)?;
        let report = import_report(&self.file, &bytes, format, self.warmup)?;
        let row = match &self.row.out {
            Some(out) => Some(self.write_row(out, &report, printer)?),
            None => None,
        };
        let outcome = Outcome { file: &self.file, report: &report, row };
        if self.json {
            printer.json(&outcome)?;
        } else {
            self.print(&report, printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn write_row(
        &self,
        out: &Path,
        report: &ImportedReport,
        printer: &mut Printer,
    ) -> anyhow::Result<Measurement> {
        let Some(runs) = &report.runs else {
            anyhow::bail!(
                "{} has no time of the whole graph, which a row of a table is",
                self.file.display()
            );
        };
        let name = self.file.file_name().unwrap_or(self.file.as_os_str());
        let text = format!(
            "{} of {}, {}{}",
            report.timed.as_deref().unwrap_or("the time"),
            name.to_string_lossy(),
            match report.format {
                ReportFormat::AiHub => "a profile of Qualcomm AI Hub",
                ReportFormat::Ort => "a trace of ONNX Runtime",
                ReportFormat::QnnCsv => "profiling events of QNN",
            },
            match self.warmup {
                0 => String::new(),
                warmup => format!(", after a warm-up of {warmup}"),
            }
        );
        let part = &self.part;
        let given =
            |value: &Option<String>, option| value.clone().with_context(|| missing(out, option));
        let (device, soc) = (given(&part.device, "--device")?, given(&part.soc, "--soc")?);
        let runtime = given(&part.runtime, "--runtime")?;
        let model = ModelShape::named(&given(&part.model, "--model")?)?;
        for warning in &model.warnings {
            printer.warn(warning);
        }
        let kind = match part.layer_kind.with_context(|| missing(out, "--layer-kind"))? {
            Kind::Sliding => PartKind::Sliding,
            Kind::Full => PartKind::Full,
            Kind::Head => PartKind::Head,
            Kind::Block => PartKind::Block,
        };
        let layout = part.layout.map(|layout| match layout {
            RowLayout::Ring => CacheLayout::Ring,
            RowLayout::Roll => CacheLayout::Roll,
        });
        let new = NewRow {
            config: &model.config,
            device,
            soc,
            runtime,
            precision: None,
            dialect: part.dialect.clone(),
            kind,
            layout,
            context: part.context,
            tokens: part.tokens,
            variant: None,
            timing_only: part.timing_only,
            runs,
            origin: Origin::Imported,
            text,
        };
        self.row.write(out, new, printer)
    }

    fn print(&self, report: &ImportedReport, printer: &mut Printer) -> anyhow::Result<()> {
        printer.line(format!("{}: {}", self.file.display(), report.format))?;
        match (&report.runs, &report.timed) {
            (Some(runs), Some(timed)) => printer.line(format!("{timed}: {}", times_line(runs)))?,
            _ => printer.line("no time of the whole graph")?,
        }
        for list in &report.operators {
            print_operators(list, self.top, printer)?;
        }
        for note in &report.notes {
            printer.line(format!("note: {note}"))?;
        }
        Ok(())
    }
}

/// The operators that took most, with their shares of the sum.
fn print_operators(list: &OperatorTimes, top: usize, printer: &mut Printer) -> anyhow::Result<()> {
    let total = list.total();
    let digits = if list.quantity == Quantity::Microseconds { 1 } else { 0 };
    printer.line(format!(
        "{} operator{}, {total:.digits$} {} in all, imported",
        list.operators.len(),
        if list.operators.len() == 1 { "" } else { "s" },
        list.quantity
    ))?;
    let mut sorted: Vec<_> = list.operators.iter().collect();
    sorted.sort_by(|a, b| b.amount.total_cmp(&a.amount));
    let mut rows = vec![
        ["operator", "type", "unit", list.quantity.name(), "share"].map(str::to_owned).to_vec(),
    ];
    for operator in sorted.iter().take(top) {
        let share = if total > 0.0 { 100.0 * operator.amount / total } else { 0.0 };
        rows.push(vec![
            operator.name.clone(),
            operator.operator.clone().unwrap_or_else(|| "-".into()),
            operator.unit.clone().unwrap_or_else(|| "-".into()),
            format!("{:.digits$}", operator.amount),
            format!("{share:.1} %"),
        ]);
    }
    for line in table(&rows) {
        printer.line(line)?;
    }
    match sorted.len().saturating_sub(top) {
        0 => {}
        left => printer.line(format!("and {left} more"))?,
    }
    Ok(())
}
