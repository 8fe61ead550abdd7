use super::read_table;
use crate::commands::export::{GeluForm, Layout};
use crate::printer::{Printer, table};
use crate::source::{self};
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_artifact::Manifest;
use firesteel_check::audit::Schematic;
use firesteel_checkpoint::ModelConfig;
use firesteel_compile::{PartEntry, PartRole, StepEntry};
use firesteel_export::Gelu;
use firesteel_model::{Model, ModelShape, PathKind};
use firesteel_profile::{
    Alternative, Basis, CacheMoves, CompiledGraph, Estimate, Fit, FitSelection, Grouped, KvElement,
    PartCost, PartKind, Selection, SessionGraph, StepChoice, StepCost, Table, WhatIf, cache_moves,
    compose, fit, what_if,
};
use firesteel_step::TensorSpec;
use serde::Serialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The time of a step that nobody has measured, from its graph and a device's measured layers.
///
/// Bytes and operations are counted from the step's graph: what crosses the memory (weights, caches,
/// inputs and outputs) and what operators move. The measured layers of a table are fitted with
/// ms = bytes / bandwidth + moved bytes / bandwidth + operations / rate + overhead, as far as there
/// are rows, and the fit's error is printed row by row. Every time is an estimate. Of a compiled
/// artifact the bytes that the compiler plans to move are shown beside those that are counted.
#[derive(Debug, Args)]
pub(crate) struct EstimateCommand {
    #[command(flatten)]
    what: EstimateArgs,
    /// Compare with other layouts, contexts, precisions, forms of GELU, head graphs and caches
    #[arg(long)]
    what_if: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is estimated, and on which device.
#[derive(Debug, Args)]
pub(super) struct EstimateArgs {
    /// Shape (a preset of `synth`), config.json, checkpoint, artifact or compiled
    /// artifact
    #[arg(long, value_name = "NAME|PATH")]
    pub(super) model: String,
    /// Contexts [default: 1024; an artifact has its own]
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    pub(super) context: Vec<usize>,
    /// Number format, as the table names it: fp16, w8a16, w4a16, … (an artifact has its own)
    #[arg(long, value_name = "NAME")]
    pub(super) precision: Option<String>,
    /// Cache layout [default: auto, which is ring for sliding and roll for full layers]
    #[arg(long, value_enum)]
    pub(super) layout: Option<Layout>,
    /// Number format of cache entries: f32, f16, i16 or i8 [default: that of the activations]
    #[arg(long, value_name = "FORMAT")]
    kv: Option<KvElement>,
    /// Form of the GELU activation [default: exact]
    #[arg(long, value_enum)]
    gelu: Option<GeluForm>,
    /// Graphs that the head is cut into [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    head_shards: Option<u16>,
    /// Device with a table of its own
    #[arg(long, value_enum, default_value_t = Device::GalaxyS25, conflicts_with = "table")]
    device: Device,
    /// Table of layer times
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Runtime, as the table names it
    #[arg(long, value_name = "NAME", default_value = "qnn-npu")]
    runtime: String,
    /// Spelling of the measured graphs, where the table has several
    #[arg(long, value_name = "NAME")]
    dialect: Option<String>,
}

/// A device whose published times are built in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    #[value(name = "galaxy-s25")]
    GalaxyS25,
}

/// The estimates of a model.
#[derive(Debug, Serialize)]
struct Estimates {
    model: String,
    /// The speed of the device; null where the table has no rows to fit.
    fit: Option<Fit>,
    /// Why there is no fit.
    fit_missing: Option<String>,
    steps: Vec<StepEstimate>,
    /// Bytes of cache movement in a sliding layer.
    cache_moves: Option<CacheMoves>,
    /// What the compiler planned; null where nothing was compiled.
    compiled: Option<CompiledTraffic>,
    what_if: Option<Vec<Alternative>>,
}

/// A step, and what it is composed of the measured layers where there are such.
#[derive(Debug, Serialize)]
struct StepEstimate {
    choice: StepChoice,
    #[serde(flatten)]
    estimate: Estimate,
    composed: Option<ComposedTime>,
    /// Its graphs against the limits of a session.
    graphs: Vec<SessionGraph>,
}

/// A time that is composed of the table's layers.
#[derive(Debug, Serialize)]
struct ComposedTime {
    /// Layers, and the head where it was measured, ms.
    ms: f64,
    /// Whether the head is in it.
    head: bool,
    basis: Option<Basis>,
}

/// The compiler's plan of a step.
#[derive(Debug, Serialize)]
pub(super) struct CompiledTraffic {
    /// Operators of the device.
    htp_ops: u64,
    /// Bytes read from memory and written to it.
    memory_bytes: u64,
    pub(super) memory_by_group: Grouped,
    pub(super) vtcm_by_group: Grouped,
}

/// What is estimated: steps to export, or one that there is.
pub(super) struct Subject {
    /// The model, or the slice of it.
    pub(super) config: ModelConfig,
    /// Number in the model of the first layer.
    first_layer: usize,
    pub(super) choices: Vec<StepChoice>,
    /// The counts of an artifact's graphs.
    cost: Option<StepCost>,
    /// The compiled step.
    pub(super) compiled: Option<StepEntry>,
    /// Why its time cannot be had.
    pub(super) untimed: Option<String>,
}

impl EstimateCommand {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let estimates = self.what.estimates(self.what_if, printer)?;
        if self.json {
            printer.json(&estimates)?;
        } else {
            print(&estimates, printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl EstimateArgs {
    /// The device's table.
    pub(super) fn table(&self) -> anyhow::Result<Table> {
        let Device::GalaxyS25 = self.device;
        read_table(self.table.as_deref())
    }

    /// The rows that a step's time is fitted on.
    pub(super) fn selection(&self, choice: &StepChoice) -> FitSelection {
        FitSelection {
            runtime: self.runtime.clone(),
            precision: choice.precision.clone(),
            dialect: self.dialect.clone(),
        }
    }

    fn estimates(&self, with_what_if: bool, printer: &mut Printer) -> anyhow::Result<Estimates> {
        let subject = self.subject(printer)?;
        let table = self.table()?;
        let Some(base) = subject.choices.first().cloned() else { bail!("--context is empty") };
        let selection = self.selection(&base);
        let fitted = match &subject.untimed {
            Some(reason) => Err(reason.clone()),
            None => fit(&subject.config, &table, &selection).map_err(|error| error.to_string()),
        };
        let (fit, fit_missing) = match fitted {
            Ok(fit) => (Some(fit), None),
            Err(reason) => (None, Some(reason)),
        };
        let schematics: Vec<&Schematic> =
            subject.compiled.iter().flat_map(|entry| &entry.parts).filter_map(plan).collect();
        let mut steps = Vec::new();
        for choice in &subject.choices {
            let mut cost = match &subject.cost {
                Some(cost) => cost.clone(),
                None => StepCost::of_choice(&subject.config, choice)?,
            };
            if !schematics.is_empty() {
                cost = cost.with_schematics(
                    schematics.iter().copied(),
                    &subject.config.layer_types,
                    subject.first_layer,
                );
            }
            let composed = composed(&subject.config, &table, &selection, choice);
            let graphs = match &subject.compiled {
                Some(entry) => compiled_graphs(entry, &cost),
                None => planned_graphs(choice, &cost),
            };
            let estimate = Estimate::new(cost, fit.as_ref());
            steps.push(StepEstimate { choice: choice.clone(), estimate, composed, graphs });
        }
        let countable =
            subject.untimed.is_none() && StepCost::of_choice(&subject.config, &base).is_ok();
        let cache_moves = if countable { cache_moves(&subject.config, &base)? } else { None };
        let what_if = match with_what_if {
            false => None,
            true => {
                let contexts = if self.context.len() > 1 {
                    self.context[1..].to_vec()
                } else {
                    vec![base.context.saturating_mul(4)]
                };
                let what = WhatIf { contexts, selection: selection.clone() };
                Some(what_if(&subject.config, &table, &base, &what)?)
            }
        };
        Ok(Estimates {
            model: self.model.clone(),
            fit,
            fit_missing,
            steps,
            cache_moves,
            compiled: CompiledTraffic::of(&schematics),
            what_if,
        })
    }

    pub(super) fn subject(&self, printer: &mut Printer) -> anyhow::Result<Subject> {
        let path = Path::new(&self.model);
        let kind = path.exists().then(|| PathKind::of(path)).transpose()?;
        if let Some(PathKind::Artifact | PathKind::Compiled) = kind {
            return self.existing(path, printer);
        }
        let ModelShape { config, warnings, .. } = ModelShape::named(&self.model)?;
        for warning in &warnings {
            printer.warn(warning);
        }
        let precision = self.precision.clone().context(
            "--precision is missing: a number format as the table names it, such as w8a16",
        )?;
        let contexts = if self.context.is_empty() { &[1024][..] } else { &self.context };
        let choice = |&context: &usize| StepChoice {
            context,
            layout: self.layout.unwrap_or(Layout::Auto).choice(),
            precision: precision.clone(),
            kv: self.kv,
            gelu: self.gelu.map_or(Gelu::Exact, GeluForm::gelu),
            head_shards: usize::from(self.head_shards.unwrap_or(1)),
        };
        let choices = contexts.iter().map(choice).collect();
        Ok(Subject { config, first_layer: 0, choices, cost: None, compiled: None, untimed: None })
    }

    /// An artifact, compiled or not.
    fn existing(&self, path: &Path, printer: &mut Printer) -> anyhow::Result<Subject> {
        let given = [
            ("--context", !self.context.is_empty()),
            ("--precision", self.precision.is_some()),
            ("--layout", self.layout.is_some()),
            ("--kv", self.kv.is_some()),
            ("--gelu", self.gelu.is_some()),
            ("--head-shards", self.head_shards.is_some()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
            bail!(
                "{option} is for a step that is not exported yet, and {} is an artifact; leave it \
                 out, or give --model the checkpoint",
                path.display()
            );
        }
        let source = source::open(path, printer)?;
        let manifest = source.manifest().context("the artifact has no manifest")?;
        let config = ModelConfig { layer_types: manifest.layer_types.clone(), ..source.config()? };
        let (choice, first_layer) = (exported(manifest), manifest.step.first_layer);
        let tokens = manifest.step.tokens;
        let untimed = (tokens != 1).then(|| {
            format!("a step of {tokens} tokens, and the table's rows are of steps of one")
        });
        let (cost, compiled) = match &source {
            Model::Artifact(artifact) => {
                let graphs: Vec<_> = manifest
                    .graphs
                    .iter()
                    .map(|graph| artifact.read_graph(graph))
                    .collect::<Result<_, _>>()?;
                let kinds = &manifest.layer_types;
                (Some(StepCost::of_graphs(&graphs, kinds, first_layer)?), None)
            }
            Model::Compiled(step) => (None, Some(step.entry()?.clone())),
            Model::Checkpoint(_) => (None, None),
        };
        if cost.is_none() && tokens != 1 {
            bail!("{} is compiled for steps of {tokens} tokens; estimate the artifact", self.model);
        }
        Ok(Subject { config, first_layer, choices: vec![choice], cost, compiled, untimed })
    }
}

/// The choice that an artifact was exported with.
fn exported(manifest: &Manifest) -> StepChoice {
    let options = &manifest.options;
    let (precision, kv) = match &manifest.quantization {
        None => (format!("fp{}", options.precision.dtype().bits()), None),
        Some(known) => {
            let kv = match known.kv.as_str() {
                "s16" => Some(KvElement::I16),
                "s8" | "u8" => Some(KvElement::I8),
                _ => None,
            };
            (known.scheme.clone(), kv)
        }
    };
    StepChoice {
        context: options.context,
        layout: options.cache_layout,
        precision,
        kv,
        gelu: options.gelu,
        head_shards: if manifest.has_head() { options.head_shards } else { 0 },
    }
}

/// What the compiler planned for a part.
pub(super) fn plan(part: &PartEntry) -> Option<&Schematic> {
    part.audit.schematic.as_ref()
}

/// The parts of a compiled step against the limits of a session.
fn compiled_graphs(entry: &StepEntry, cost: &StepCost) -> Vec<SessionGraph> {
    let graph = |part: &PartEntry| {
        let (cache_bytes, returned_bytes, largest) = match &part.role {
            PartRole::Layers { step } => {
                let step = step.clone().with_encodings(&part.ports);
                let bytes = |t: &TensorSpec| Some(t.dtype.byte_count(&t.shape)? as u64);
                let returned = step.outputs.iter().map(bytes).sum::<Option<u64>>();
                (step.cache_bytes() as u64, returned, cost.largest_operator.as_ref())
            }
            PartRole::Head { .. } => (0, None, None),
        };
        SessionGraph::new(
            part.name.clone(),
            part.constant_bytes.saturating_add(cache_bytes),
            largest.map(|largest| (largest.node.as_str(), largest.bytes)),
            Some(CompiledGraph {
                schematic: plan(part),
                binary_bytes: part.binary_bytes,
                returned_bytes,
            }),
        )
    };
    entry.parts.iter().map(graph).collect()
}

/// The graphs that a step would be exported as.
fn planned_graphs(choice: &StepChoice, cost: &StepCost) -> Vec<SessionGraph> {
    let of = |part: &PartCost| part.cost.weight_bytes.saturating_add(part.cost.cache_read_bytes);
    let sharded = choice.head_shards > 1;
    let in_step = cost.parts.iter().filter(|part| part.kind != PartKind::Head || !sharded);
    let addressed =
        in_step.map(|part| of(part).saturating_mul(part.count as u64)).fold(0, u64::saturating_add);
    let largest = cost.largest_operator.as_ref();
    let largest = largest.map(|largest| (largest.node.as_str(), largest.bytes));
    let step = SessionGraph::new("step".into(), addressed, largest, None);
    let heads = cost.parts.iter().filter(|part| part.kind == PartKind::Head && sharded);
    let heads = heads.map(|part| {
        SessionGraph::new(format!("each of {} heads", part.count), of(part), None, None)
    });
    std::iter::once(step).chain(heads).collect()
}

impl CompiledTraffic {
    pub(super) fn of(schematics: &[&Schematic]) -> Option<Self> {
        let mut all = Schematic::default();
        for schematic in schematics {
            all.total.htp_ops = all.total.htp_ops.saturating_add(schematic.total.htp_ops);
            all.nodes.extend(schematic.nodes.iter().cloned());
        }
        if all.nodes.is_empty() {
            return None;
        }
        let moved = |node: &firesteel_check::audit::NodeTraffic| {
            node.traffic.dram_read.saturating_add(node.traffic.dram_write)
        };
        Some(Self {
            htp_ops: all.total.htp_ops,
            memory_bytes: all.nodes.iter().map(moved).fold(0, u64::saturating_add),
            memory_by_group: Grouped::of_memory_traffic(&all, "planned memory traffic".into()),
            vtcm_by_group: Grouped::of_vtcm_traffic(&all, "planned VTCM traffic".into()),
        })
    }
}

/// The measurements that make a step of the same kind.
pub(super) fn composition_of(selection: &FitSelection, choice: &StepChoice) -> Selection {
    Selection {
        runtime: selection.runtime.clone(),
        precision: selection.precision.clone(),
        dialect: selection.dialect.clone(),
        layout: choice.layout,
    }
}

/// The step composed of the table's layers, where it has them for this model and choice.
fn composed(
    config: &ModelConfig,
    table: &Table,
    selection: &FitSelection,
    choice: &StepChoice,
) -> Option<ComposedTime> {
    let selection = composition_of(selection, choice);
    // A table of other layers, or without these, has no such time.
    let composition = compose(config, table, &selection, &[choice.context]).ok()?;
    let step = composition.steps.into_iter().next()?;
    let head = choice.head_shards > 0 && step.step_ms.is_some();
    let ms = if head { step.step_ms } else { step.layers_ms };
    Some(ComposedTime { ms: ms?, head, basis: step.basis })
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e6)
}

fn print(estimates: &Estimates, printer: &mut Printer) -> anyhow::Result<()> {
    printer.line(format!("{}: estimated, nothing here is measured", estimates.model))?;
    let mut rows = vec![
        [
            "context",
            "part",
            "memory MB",
            "moved MB",
            "Mop",
            "planned MB",
            "ms",
            "outside of the rows",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for step in &estimates.steps {
        let time = step.estimate.time.as_ref();
        for (index, part) in step.estimate.cost.parts.iter().enumerate() {
            let estimated = time.and_then(|time| time.parts.get(index));
            let planned = part.compiled_memory_bytes.map_or_else(|| "-".into(), megabytes);
            rows.push(vec![
                step.choice.context.to_string(),
                format!("{} × {}", part.count, part.kind),
                megabytes(part.cost.memory_bytes()),
                megabytes(part.cost.moved_bytes),
                format!("{:.1}", part.cost.operations as f64 / 1e6),
                planned,
                estimated.map_or_else(|| "-".into(), |part| format!("{:.3}", part.ms)),
                estimated.map_or_else(String::new, |part| part.beyond.join(", ")),
            ]);
        }
    }
    lines(&rows, printer)?;
    for step in &estimates.steps {
        print_step(step, printer)?;
    }
    for step in &estimates.steps {
        for graph in &step.graphs {
            printer.line(format!("context {}: {}", step.choice.context, limits(graph)))?;
        }
    }
    if let Some(compiled) = &estimates.compiled {
        printer.line(format!(
            "planned by the compiler: {} operators of the device, {} MB from and to memory: {}",
            compiled.htp_ops,
            megabytes(compiled.memory_bytes),
            shares(&compiled.memory_by_group)
        ))?;
        printer.line(format!("planned within VTCM: {}", shares(&compiled.vtcm_by_group)))?;
    }
    if let Some(moves) = &estimates.cache_moves {
        printer.line(format!(
            "cache moves in a sliding layer: {} MB as a ring ({:.1} % of what it moves), {} MB \
             rolled ({:.1} %)",
            megabytes(moves.ring_bytes),
            100.0 * moves.ring_share,
            megabytes(moves.roll_bytes),
            100.0 * moves.roll_share,
        ))?;
    }
    match (&estimates.fit, &estimates.fit_missing) {
        (Some(fit), _) => print_fit(fit, printer)?,
        (None, Some(reason)) => printer.line(format!("no time: {reason}"))?,
        (None, None) => {}
    }
    if let Some(alternatives) = &estimates.what_if {
        print_alternatives(alternatives, printer)?;
    }
    Ok(())
}

fn print_step(step: &StepEstimate, printer: &mut Printer) -> anyhow::Result<()> {
    let context = step.choice.context;
    let Some(time) = &step.estimate.time else { return Ok(()) };
    let planned = time
        .compiled_step_ms
        .map_or_else(String::new, |ms| format!(", {ms:.2} with the bytes that the compiler plans"));
    let composed = step.composed.as_ref().map_or_else(String::new, |composed| {
        let what = if composed.head { "" } else { " without the head" };
        let basis = composed.basis.map_or("", Basis::name);
        format!("; composed of the table's layers{what} {:.2} ({basis})", composed.ms)
    });
    let rate =
        time.tokens_per_second.map_or_else(String::new, |rate| format!(", {rate:.1} tokens/s"));
    printer.line(format!(
        "context {context}: estimated {:.2} ms{rate}{planned}{composed}",
        time.step_ms
    ))?;
    let groups: Vec<String> = time
        .groups
        .iter()
        .filter(|group| group.share >= 0.0005)
        .map(|group| {
            let name = group.group.map_or("overhead", |group| group.name());
            format!("{name} {:.1} %", 100.0 * group.share)
        })
        .collect();
    printer.line(format!("context {context}: estimated by group: {}", groups.join(", ")))?;
    Ok(())
}

/// A graph against the limits of a session.
fn limits(graph: &SessionGraph) -> String {
    let within = |fits: bool| if fits { "within" } else { "ABOVE" };
    let mut text = format!(
        "{} addresses {} MB, {} the limit of {}",
        graph.name,
        megabytes(graph.addressed_bytes),
        within(graph.addressable),
        megabytes(graph.graph_limit_bytes)
    );
    if let (Some(node), Some(bytes), Some(fits)) =
        (&graph.largest_operator, graph.largest_operator_bytes, graph.largest_operator_fits)
    {
        let _ = write!(
            text,
            "; largest working set {} MB ({node}), {} VTCM of {}",
            megabytes(bytes),
            within(fits),
            megabytes(graph.vtcm_limit_bytes)
        );
    }
    let compiled = [
        ("VTCM in use", graph.vtcm_used_bytes),
        ("values kept in memory", graph.memory_values_bytes),
        ("written beyond its outputs", graph.spilled_bytes),
        ("context binary", graph.context_binary_bytes),
    ];
    for (what, bytes) in compiled {
        if let Some(bytes) = bytes {
            let _ = write!(text, "; {what} {} MB", megabytes(bytes));
        }
    }
    text
}

fn shares(grouped: &Grouped) -> String {
    let groups = grouped.groups.iter().filter(|group| group.share >= 0.0005);
    let texts: Vec<String> =
        groups.map(|group| format!("{} {:.1} %", group.group, 100.0 * group.share)).collect();
    texts.join(", ")
}

fn print_fit(fit: &Fit, printer: &mut Printer) -> anyhow::Result<()> {
    let terms: Vec<String> = fit
        .terms
        .iter()
        .map(|term| match (term.value, term.left_out) {
            (Some(value), _) => format!("{} {value:.3} {}", term.term.name(), term.unit),
            (None, reason) => format!("{} left out ({})", term.term.name(), reason.unwrap_or("-")),
        })
        .collect();
    printer.line(format!(
        "fitted on {} of {}, {}, {}, {}: {}",
        match fit.rows.len() {
            1 => "1 row".to_owned(),
            rows => format!("{rows} rows"),
        },
        fit.device,
        fit.soc,
        fit.selection.runtime,
        fit.selection.precision,
        terms.join(", ")
    ))?;
    if fit.timing_only {
        printer.line("timing only: these builds compute something else than the model")?;
    }
    let mut rows = vec![
        ["row", "layout", "context", "measured", "fitted", "error %", "left out %"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for row in &fit.rows {
        let percent = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:+.1}"));
        rows.push(vec![
            row.kind.to_string(),
            row.layout.map_or_else(|| "-".into(), |layout| format!("{layout:?}").to_lowercase()),
            row.context.map_or_else(|| "-".into(), |context| context.to_string()),
            format!("{:.3}", row.measured_ms),
            format!("{:.3}", row.fitted_ms),
            percent(Some(row.error_percent)),
            percent(row.left_out_percent),
        ]);
    }
    lines(&rows, printer)?;
    let percent =
        |value: Option<f64>| value.map_or("not known".to_owned(), |value| format!("{value:.1} %"));
    printer.line(format!(
        "error of the fit: at most {:.1} %, RMS {}, RMS of rows left out {}",
        fit.max_percent,
        percent(fit.rms_percent),
        percent(fit.left_out_rms_percent)
    ))?;
    Ok(())
}

fn print_alternatives(all: &[Alternative], printer: &mut Printer) -> anyhow::Result<()> {
    let mut rows = vec![
        ["what if", "memory MB", "moved MB", "estimated ms", "difference", "%", "outside"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for one in all {
        let number = |value: Option<f64>, plus: bool| match value {
            None => "-".to_owned(),
            Some(value) if plus => format!("{value:+.2}"),
            Some(value) => format!("{value:.2}"),
        };
        rows.push(vec![
            one.name.clone(),
            megabytes(one.memory_bytes),
            megabytes(one.moved_bytes),
            number(one.step_ms, false),
            number(one.difference_ms, true),
            number(one.difference.map(|share| 100.0 * share), true),
            one.beyond.map_or("-", |beyond| if beyond { "yes" } else { "no" }).to_owned(),
        ]);
    }
    lines(&rows, printer)?;
    for one in all {
        if let Some(reason) = &one.missing {
            printer.line(format!("{}: no time: {reason}", one.name))?;
        }
    }
    printer.line(
        "forms of GELU that are one operator each count the same; what a device makes of them is \
         in measured rows only",
    )?;
    Ok(())
}

fn lines(rows: &[Vec<String>], printer: &mut Printer) -> anyhow::Result<()> {
    for line in table(rows) {
        printer.line(line)?;
    }
    Ok(())
}
