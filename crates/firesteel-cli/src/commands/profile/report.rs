use super::estimate::{CompiledTraffic, EstimateArgs, Subject, composition_of, plan};
use crate::printer::Printer;
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_checkpoint::{LayerKind, ModelConfig, StagedFile};
use firesteel_profile::{
    Document, EstimatedStep, Fit, Grouped, KvElement, MemoryRequest, ModelBytes, REPORT_LIMIT,
    ReportInput, StepChoice, StepCost, WeightCoding, WhatIf, compose, fit, html, import_report,
    memory, what_if,
};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// A page with plots: memory and time against the context, time by group, the fit's error.
///
/// One HTML file that loads nothing and has no scripts, readable in light and dark, with a table
/// under every plot. Counted, estimated, composed, imported and planned numbers are told apart.
/// --json prints exactly what is plotted.
#[derive(Debug, Args)]
pub(crate) struct ReportCommand {
    #[command(flatten)]
    what: EstimateArgs,
    /// Report of another tool, as `profile import` reads it: its operators are shown by group
    #[arg(long, value_name = "FILE")]
    operators: Vec<PathBuf>,
    /// HTML file to write
    #[arg(long, value_name = "FILE", required_unless_present = "json")]
    out: Option<PathBuf>,
    /// Replace an existing report
    #[arg(long)]
    force: bool,
    /// Print what is plotted as JSON
    #[arg(long)]
    json: bool,
}

/// Contexts of the plot of memory, and of that of time where none are given.
const MEMORY_CONTEXTS: [usize; 11] = [
    1 << 10,
    1 << 11,
    1 << 12,
    1 << 13,
    1 << 14,
    1 << 15,
    1 << 16,
    1 << 17,
    1 << 18,
    1 << 19,
    1 << 20,
];
const TIME_CONTEXTS: [usize; 6] = [1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15];

/// What the first line of a report's page is; an existing file without it is not replaced.
const FIRST_LINE: &[u8] = b"<!doctype html>";

impl ReportCommand {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let document = self.document(printer)?;
        if let Some(out) = &self.out {
            let page = html(&document);
            let ours = |path: &Path| {
                let mut start = [0u8; FIRST_LINE.len()];
                let read = fs_err::File::open(path)?.read_exact(&mut start);
                Ok(read.is_ok() && start == *FIRST_LINE)
            };
            let replace: Option<fn(&Path) -> std::io::Result<bool>> = self.force.then_some(ours);
            let staged = StagedFile::create(out, replace).with_context(|| {
                let hint = if self.force { "" } else { " (--force replaces a page)" };
                format!("{} was not written{hint}", out.display())
            })?;
            staged.file().write_all(page.as_bytes())?;
            staged.commit()?;
            if !self.json {
                printer.line(format!("wrote {}", out.display()))?;
                for figure in &document.figures {
                    let points: usize =
                        figure.series.iter().map(|series| series.points.len()).sum();
                    printer.line(format!("{}: {points} values", figure.title))?;
                }
                for note in &document.notes {
                    printer.line(note)?;
                }
            }
        }
        if self.json {
            printer.json(&document)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn document(&self, printer: &mut Printer) -> anyhow::Result<Document> {
        let subject = self.what.subject(printer)?;
        let table = self.what.table()?;
        let Some(base) = subject.choices.first().cloned() else { bail!("--context is empty") };
        let choices: Vec<StepChoice> = match self.what.context.is_empty() {
            false => subject.choices.clone(),
            true => {
                let others = TIME_CONTEXTS.into_iter().filter(|context| *context != base.context);
                let mut choices = vec![base.clone()];
                choices.extend(others.map(|context| StepChoice { context, ..base.clone() }));
                choices
            }
        };
        let selection = self.what.selection(&base);
        let mut missing = Vec::new();
        let fitted = match &subject.untimed {
            Some(reason) => Err(reason.clone()),
            None => fit(&subject.config, &table, &selection).map_err(|error| error.to_string()),
        };
        let fitted = fitted.map_err(|reason| missing.push(reason)).ok();
        let (mut estimated, mut all_full) = (Vec::new(), Vec::new());
        if let Some(fit) = &fitted {
            estimated = estimates(&subject.config, fit, &choices)?;
            if let Some(config) = all_full_of(&subject.config) {
                all_full = estimates(&config, fit, &choices)?;
            }
        }
        let mut contexts: Vec<usize> = choices.iter().map(|choice| choice.context).collect();
        contexts.sort_unstable();
        contexts.dedup();
        // A table of other layers, or without these, has no such times.
        let composed =
            compose(&subject.config, &table, &composition_of(&selection, &base), &contexts);
        let composed = composed.map_err(|error| missing.push(error.to_string())).ok();
        let alternatives = match &fitted {
            Some(_) => {
                let contexts = vec![base.context.saturating_mul(4)];
                let what = WhatIf { contexts, selection: selection.clone() };
                what_if(&subject.config, &table, &base, &what)?
            }
            None => Vec::new(),
        };
        let step = format!(
            "one token, {}, layout {}, GELU {}",
            base.precision,
            format!("{:?}", base.layout).to_lowercase(),
            format!("{:?}", base.gelu).to_lowercase()
        );
        let input = ReportInput {
            model: &self.what.model,
            step: &step,
            memory: &memory_of(&subject.config, &base)?,
            composed: composed.as_ref(),
            estimated: &estimated,
            estimated_all_full: &all_full,
            fit: fitted.as_ref(),
            groups: &self.groups(&subject)?,
            alternatives: &alternatives,
        };
        let mut document = Document::new(&input);
        document.notes.extend(missing.into_iter().map(|reason| format!("Not known: {reason}.")));
        Ok(document)
    }

    /// What operators took by the reports of other tools, and what the compiler planned.
    fn groups(&self, subject: &Subject) -> anyhow::Result<Vec<Grouped>> {
        let mut groups = Vec::new();
        for path in &self.operators {
            let mut bytes = Vec::new();
            fs_err::File::open(path)?.take(REPORT_LIMIT + 1).read_to_end(&mut bytes)?;
            let report = import_report(path, &bytes, None, 0)?;
            if report.operators.is_empty() {
                bail!("{} has no operators", path.display());
            }
            groups.extend(report.operators.iter().map(Grouped::of));
        }
        let plans: Vec<_> =
            subject.compiled.iter().flat_map(|entry| &entry.parts).filter_map(plan).collect();
        if let Some(traffic) = CompiledTraffic::of(&plans) {
            groups.extend([traffic.memory_by_group, traffic.vtcm_by_group]);
        }
        Ok(groups)
    }
}

/// The estimated steps of `config`.
fn estimates(
    config: &ModelConfig,
    fit: &Fit,
    choices: &[StepChoice],
) -> anyhow::Result<Vec<(usize, EstimatedStep)>> {
    let mut steps = Vec::with_capacity(choices.len());
    for choice in choices {
        let cost = StepCost::of_choice(config, choice)?;
        steps.push((choice.context, EstimatedStep::new(&cost, fit)));
    }
    Ok(steps)
}

/// The same model with full layers only; `None` when it has none that others could be like.
fn all_full_of(config: &ModelConfig) -> Option<ModelConfig> {
    let layers = config.num_layers();
    config.rope_full.map(|_| ModelConfig {
        layer_types: vec![LayerKind::Full; layers],
        sliding_window: None,
        rope_sliding: None,
        ..config.clone()
    })
}

/// Weights and caches at the contexts of the plot.
fn memory_of(
    config: &ModelConfig,
    choice: &StepChoice,
) -> anyhow::Result<firesteel_profile::Memory> {
    let kv = choice.kv.unwrap_or(match choice.precision.as_str() {
        "fp32" => KvElement::F32,
        name if name.ends_with("a16") => KvElement::I16,
        name if name.ends_with("a8") => KvElement::I8,
        _ => KvElement::F16,
    });
    let bytes = ModelBytes::coded(config, !config.tie_word_embeddings, WeightCoding::F16)
        .context("the model's size overflows")?;
    Ok(memory(&MemoryRequest {
        config,
        weights: &[(WeightCoding::F16.name().to_owned(), bytes)],
        contexts: &MEMORY_CONTEXTS,
        layout: choice.layout,
        kv,
        ram: None,
    })?)
}
