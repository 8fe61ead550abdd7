use super::read_table;
use crate::commands::export::Layout;
use crate::printer::{Printer, table};
use crate::source::ModelSource;
use clap::Args;
use firesteel_profile::{Basis, BreakEven, Composition, Origin, PartTime, Selection, compose};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

/// The time of a step, added up from a table of measured layers.
///
/// sliding layers × their number + full layers × theirs + head, against the same number of full
/// layers. A context that was not measured lies on the line between the contexts around it, and
/// the basis says so; outside of all of them it says extrapolated. Builds that compute something
/// else than the model are told as 'timing only'.
#[derive(Debug, Args)]
pub(crate) struct Compose {
    /// Shape (spark-x2.5-1.7b, spark-x2.5-4b), config.json, checkpoint folder or GGUF file
    #[arg(long, value_name = "NAME|PATH")]
    model: String,
    /// Table of layer times; else the published ones of a Galaxy S25 (1.7B)
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Contexts
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    #[arg(default_values_t = [1024, 4096])]
    context: Vec<usize>,
    /// Number format, as the table names it: fp16, w8a16, w4a16, …
    #[arg(long, value_name = "NAME")]
    precision: String,
    /// Cache layout; auto is ring for sliding and roll for full layers
    #[arg(long, value_enum, default_value_t = Layout::Auto)]
    layout: Layout,
    /// Runtime, as the table names it
    #[arg(long, value_name = "NAME", default_value = "qnn-npu")]
    runtime: String,
    /// Spelling of the graph, where the table has several
    #[arg(long, value_name = "NAME")]
    dialect: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Compose {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let ModelSource { config, warnings, .. } = ModelSource::named(&self.model)?;
        for warning in &warnings {
            printer.warn(warning);
        }
        let times = read_table(self.table.as_deref())?;
        let selection = Selection {
            runtime: self.runtime,
            precision: self.precision,
            dialect: self.dialect,
            layout: self.layout.choice(),
        };
        let composition = compose(&config, &times, &selection, &self.context)?;
        if self.json {
            printer.json(&composition)?;
        } else {
            print(&composition, printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print(composition: &Composition, printer: &mut Printer) -> anyhow::Result<()> {
    let Composition { device, soc, selection, .. } = composition;
    printer.line(format!(
        "{device}, {soc}, {}, {}: steps composed of single layers, ms",
        selection.runtime, selection.precision
    ))?;
    if composition.timing_only {
        printer.line("timing only: these builds compute something else than the model")?;
    }
    let titles = [
        "context", "sliding", "full", "layers", "all full", "speedup", "head", "step", "tokens/s",
        "basis",
    ];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    let part = |part: Option<PartTime>| {
        part.map_or_else(|| "-".to_owned(), |part| format!("{} × {:.3}", part.count, part.ms))
    };
    for step in &composition.steps {
        rows.push(vec![
            step.context.to_string(),
            part(step.sliding),
            part(step.full),
            number(step.layers_ms, 2),
            number(step.all_full_ms, 2),
            number(step.speedup, 2),
            number(step.head.map(|head| head.ms), 3),
            number(step.step_ms, 2),
            number(step.tokens_per_second, 1),
            step.basis.map_or("-", Basis::name).to_owned(),
        ]);
    }
    for line in table(&rows) {
        printer.line(line)?;
    }
    let missing: BTreeSet<&String> =
        composition.steps.iter().flat_map(|step| &step.missing).collect();
    for reason in missing {
        printer.line(format!("not known: {reason}"))?;
    }
    match composition.break_even {
        None => {}
        Some(BreakEven::AtMost(context)) => printer.line(format!(
            "sliding layers pay at context {context}, the shortest that was measured"
        ))?,
        Some(BreakEven::Interpolated(context)) => {
            printer.line(format!("sliding layers pay from context {context} on (interpolated)"))?;
        }
        Some(BreakEven::Above(context)) => printer.line(format!(
            "sliding layers do not pay up to context {context}, the longest that was measured"
        ))?,
    }
    for source in &composition.sources {
        let origin = match source.origin {
            Origin::Measured => "measured",
            Origin::Published => "published",
            Origin::Imported => "imported",
        };
        printer.line(format!("times {origin}: {}", source.text))?;
    }
    Ok(())
}
