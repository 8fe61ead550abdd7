use super::read_table;
use crate::commands::export::Layout;
use crate::printer::{Printer, table};
use firesteel_model::ModelShape;

use clap::Args;
use firesteel_profile::{
    Basis, BreakEven, ComposedPrompt, Composition, PartTime, Prompt, Selection, compose,
    compose_prompt,
};
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

/// The time of a step, added up from a table of measured layers.
///
/// sliding layers × their number + full layers × theirs + head, against the same number of full
/// layers. A context that was not measured lies on the line between the contexts around it, and
/// the basis says so; outside of all of them it says extrapolated. Builds that compute something
/// else than the model are told as 'timing only'. With --prompt and --chunk also the time of a
/// prompt, of layers that were measured with a chunk's tokens; a last chunk that the prompt does not
/// fill takes as long as the others.
#[derive(Debug, Args)]
pub(crate) struct Compose {
    /// Shape (a preset of `synth`), config.json, checkpoint folder or GGUF file
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
    /// Tokens of a prompt, whose time is added up from chunks
    #[arg(long, value_name = "N", requires = "chunk")]
    prompt: Option<usize>,
    /// Tokens of a chunk of the prompt: one step of the table's layers with as many tokens
    #[arg(long, value_name = "T", requires = "prompt")]
    chunk: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The steps, and the prompts where they were asked for.
#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    composition: Composition,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompts: Option<Vec<ComposedPrompt>>,
}

impl Compose {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let ModelShape { config, warnings, .. } = ModelShape::named(&self.model)?;
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
        let prompts = match (self.prompt, self.chunk) {
            (Some(tokens), Some(chunk)) => {
                let prompt = Prompt { tokens, chunk, contexts: &self.context };
                Some(compose_prompt(&config, &times, &selection, &prompt)?)
            }
            _ => None,
        };
        let report = Report { composition, prompts };
        if self.json {
            printer.json(&report)?;
        } else {
            print(&report.composition, report.prompts.as_deref().unwrap_or_default(), printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print(
    composition: &Composition,
    prompts: &[ComposedPrompt],
    printer: &mut Printer,
) -> anyhow::Result<()> {
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
    print_prompts(prompts, printer)?;
    let mut sources: Vec<_> = composition.sources.iter().collect();
    for source in prompts.iter().flat_map(|prompt| &prompt.sources) {
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    for source in sources {
        printer.line(format!("times {}: {}", source.origin.name(), source.text))?;
    }
    Ok(())
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn part(part: Option<PartTime>) -> String {
    part.map_or_else(|| "-".to_owned(), |part| format!("{} × {:.3}", part.count, part.ms))
}

fn print_prompts(prompts: &[ComposedPrompt], printer: &mut Printer) -> anyhow::Result<()> {
    let Some(first) = prompts.first() else { return Ok(()) };
    printer.line(format!(
        "a prompt of {} in {} chunk{} of {}, the last with {} of them; ms, first token with the head",
        first.tokens,
        first.chunks,
        if first.chunks == 1 { "" } else { "s" },
        first.chunk,
        first.last_chunk_tokens
    ))?;
    if prompts.iter().any(|prompt| prompt.timing_only) {
        printer.line("timing only: these builds compute something else than the model")?;
    }
    let titles = [
        "context",
        "sliding",
        "full",
        "chunk",
        "prompt",
        "tokens/s",
        "first token",
        "rest in steps",
        "basis",
    ];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    for prompt in prompts {
        rows.push(vec![
            prompt.context.to_string(),
            part(prompt.sliding),
            part(prompt.full),
            number(prompt.chunk_ms, 2),
            number(prompt.prompt_ms, 2),
            number(prompt.tokens_per_second, 1),
            number(prompt.time_to_first_token_ms, 2),
            number(prompt.rest_in_steps_ms, 2),
            prompt.basis.map_or("-", Basis::name).to_owned(),
        ]);
    }
    for line in table(&rows) {
        printer.line(line)?;
    }
    let missing: BTreeSet<&String> = prompts.iter().flat_map(|prompt| &prompt.missing).collect();
    for reason in missing {
        printer.line(format!("not known: {reason}"))?;
    }
    Ok(())
}
