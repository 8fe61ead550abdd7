use crate::commands::export::Layout;
use crate::printer::{Printer, mebibytes, table};
use firesteel_model::ModelShape;

use anyhow::Context as _;
use clap::Args;
use firesteel_checkpoint::Head;
use firesteel_profile::{
    GraphPart, KvElement, Memory, MemoryRequest, ModelBytes, WeightCoding, memory,
};
use serde::Serialize;
use std::process::ExitCode;

/// Bytes of weights and caches, and the graphs that a Hexagon session can hold.
///
/// Everything is counted from shapes, nothing is measured: weights as the checkpoint stores them
/// and in the formats that `inspect` names, the caches of one sequence, and the most
/// activations that are alive at the same time in a step. Compiled graphs and what else a device
/// needs come on top and are null. A graph is consecutive layers
/// (as `export --layers` takes them) with their cache inputs, together at most 2 GiB.
#[derive(Debug, Args)]
pub(crate) struct MemoryCommand {
    /// Shape (a preset of `synth`), config.json, checkpoint folder or GGUF file
    #[arg(long, value_name = "NAME|PATH")]
    model: String,
    /// Contexts
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    #[arg(default_values_t = [4096, 32768, 131_072, 1_048_576])]
    context: Vec<usize>,
    /// Number format of cache entries: f32, f16, i16, i8 or q8 (blocks of 32 with a scale)
    #[arg(long, value_name = "FORMAT", default_value_t = KvElement::F16)]
    kv: KvElement,
    /// Cache layout; auto is ring for sliding and roll for full layers
    #[arg(long, value_enum, default_value_t = Layout::Auto)]
    layout: Layout,
    /// Memory of the device: bytes, or with KB, MB, GB, KiB, MiB or GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    ram: Option<u64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The counts and whose they are.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    #[serde(flatten)]
    memory: Memory,
}

impl MemoryCommand {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let ModelShape { config, checkpoint, warnings } = ModelShape::named(&self.model)?;
        for warning in &warnings {
            printer.warn(warning);
        }
        let stored_head = checkpoint.as_ref().map_or(!config.tie_word_embeddings, |checkpoint| {
            matches!(checkpoint.head(), Head::Stored(_))
        });
        let mut weights = Vec::new();
        if let Some(checkpoint) = &checkpoint {
            weights.push(("stored".to_owned(), ModelBytes::stored(checkpoint)));
        }
        for coding in [WeightCoding::F16, WeightCoding::Int8PerRow, WeightCoding::Int4PerRow] {
            let bytes = ModelBytes::coded(&config, stored_head, coding)
                .context("the model's size overflows")?;
            weights.push((coding.name().to_owned(), bytes));
        }
        let memory = memory(&MemoryRequest {
            config: &config,
            weights: &weights,
            contexts: &self.context,
            layout: self.layout.choice(),
            kv: self.kv,
            ram: self.ram,
        })?;
        let report = Report { model: &self.model, memory };
        if self.json {
            printer.json(&report)?;
        } else {
            print(&report, printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn print(report: &Report<'_>, printer: &mut Printer) -> anyhow::Result<()> {
    let memory = &report.memory;
    printer.line(format!("{}: counted from shapes, nothing is measured", report.model))?;
    let mut titles = vec!["context".to_owned(), format!("KV {}", memory.kv), "KV all full".into()];
    titles.push("activations".into());
    for plan in memory.contexts.first().map_or(&[][..], |context| &context.plans) {
        titles.extend([format!("with {} weights", plan.weights), "graphs".into()]);
    }
    let mut rows = vec![titles];
    for context in &memory.contexts {
        let mut row = vec![
            context.context.to_string(),
            mebibytes(context.kv_bytes),
            mebibytes(context.kv_all_full_bytes),
            context.activation_bytes.map_or_else(|| "-".into(), mebibytes),
        ];
        for plan in &context.plans {
            let over = if plan.weights_and_kv_fit == Some(false) { "over " } else { "" };
            row.push(format!("{over}{}", mebibytes(plan.total_bytes)));
            row.push(plan.graphs.as_ref().map_or_else(|| "-".into(), |g| g.len().to_string()));
        }
        rows.push(row);
    }
    for line in table(&rows) {
        printer.line(line)?;
    }
    for context in &memory.contexts {
        for plan in &context.plans {
            let what = match (&plan.graphs, &plan.unsplittable) {
                (Some(parts), _) if parts.len() > 1 => {
                    parts.iter().map(part).collect::<Vec<_>>().join(", ")
                }
                (None, Some(reason)) => format!("no graphs, {reason}"),
                _ => continue,
            };
            printer.line(format!("context {}, {}: {what}", context.context, plan.weights))?;
        }
    }
    if let Some(ram) = memory.ram_bytes {
        printer.line(format!(
            "over: weights and caches alone are more than the {} of the device",
            mebibytes(ram)
        ))?;
    }
    printer.line(
        "with … weights: weights and caches; compiled graphs and what they spill are not counted, \
         `profile estimate` of a compiled artifact tells them",
    )?;
    Ok(())
}

/// The layers of a graph and what it addresses.
fn part(part: &GraphPart) -> String {
    let layers = part.first_layer..part.end_layer;
    let what = match (layers.is_empty(), part.head) {
        (true, _) => "head".to_owned(),
        (false, true) => format!("{}:{} and head", layers.start, layers.end),
        (false, false) => format!("{}:{}", layers.start, layers.end),
    };
    format!("{what} {}", mebibytes(part.weight_bytes + part.kv_bytes))
}

/// A number of bytes with or without a unit.
fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 6] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("KB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
    ];
    let unit = UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)));
    let (number, unit) = unit.unwrap_or((text, 1));
    let size = number.trim().parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    size.filter(|size| *size > 0)
        .ok_or_else(|| "accepted: a positive whole number, as 8GiB or 8589934592".into())
}
