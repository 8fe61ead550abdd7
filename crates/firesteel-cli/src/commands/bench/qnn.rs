use crate::commands::export::threads;
use crate::commands::worker::worker_command;
use crate::printer::{Printer, table};
use crate::source::OrtArgs;
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_artifact::{
    Artifact, Draft, ExportRequest, Quantization, Write, export, write_artifact,
};
use firesteel_check::audit::{Audit, NodeTraffic, Rule, Traffic};
use firesteel_checkpoint::{
    Checkpoint, LayerKind, ModelConfig, RandomWeights, cache_root, preset, presets,
};
use firesteel_compile::{CompileOptions, Split, compile};
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision, build};
use firesteel_graph::Part;
use firesteel_model::ModelShape;
use firesteel_ort::qnn::{Performance, Soc};
use firesteel_quantize::weights::round_nearest;
use firesteel_quantize::{
    GraphKv, RangeSource, Scheme, SchemeOptions, ValueFormats, plan, quantize,
};
use firesteel_step::{CacheLayoutChoice, Logits};
use firesteel_tensor::DType;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

/// What the compiler for a phone's NPU plans for one layer, spelled in different ways.
///
/// Compiles a sliding layer, where the model has one, with its window as a ring and rolled, a layer
/// with its norms fused and decomposed, and a full layer with keys and values of every number format,
/// and prints operators and bytes a step. Weights are random and integers uncalibrated: the plan does
/// not depend on them. Nothing is executed, and no time is known here.
#[derive(Debug, Args)]
pub(super) struct BenchQnn {
    /// Shape: `small` (hidden 512, feed-forward 1024), a published shape, a config.json or a
    /// checkpoint
    #[arg(long, value_name = "NAME|FILE", default_value = "small")]
    model: String,
    /// The phone's chip
    #[arg(long, value_name = "NAME", default_value = "sm8750")]
    soc: String,
    /// Entries of a full-attention layer's cache
    #[arg(long, value_name = "N", default_value_t = 1024)]
    context: usize,
    #[command(flatten)]
    ort: OrtArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    soc: String,
    context: usize,
    cases: Vec<Case>,
    gains: Vec<Gain>,
}

/// One compilation, as planned a step.
#[derive(Debug, Serialize)]
struct Case {
    name: String,
    /// Operators that the compiler was given.
    qnn_ops: usize,
    /// All operators of the device, and what they move.
    total: Traffic,
    /// Those of the norms.
    norms: Traffic,
    binary_bytes: u64,
}

/// Figures of one case over those of another.
#[derive(Debug, Serialize)]
struct Gain {
    what: &'static str,
    qnn_ops: f64,
    htp_ops: f64,
    dram: f64,
    vtcm: f64,
}

/// What is compiled.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Spelling {
    kind: LayerKind,
    layout: CacheLayoutChoice,
    form: Form,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Half precision, norms and the activation as few operators as there can be.
    Half,
    /// Half precision in the portable dialect, whose norms are decomposed.
    Decomposed,
    /// 8-bit weights, 16-bit activations, and such keys and values.
    Integers(GraphKv),
}

impl Spelling {
    fn name(self) -> String {
        let layout = if self.layout == CacheLayoutChoice::Ring { "ring" } else { "roll" };
        let form = match self.form {
            Form::Half => "fp16, norms fused".to_owned(),
            Form::Decomposed => "fp16, norms decomposed".to_owned(),
            Form::Integers(kv) => format!("w8a16, {kv} keys and values"),
        };
        format!("{}, {layout}, {form}", self.kind)
    }
}

/// A shape that compiles in a second or two.
fn small() -> anyhow::Result<ModelConfig> {
    let first = presets().into_iter().next().and_then(preset);
    let mut config = first.context("a known shape")?;
    (config.hidden_size, config.intermediate_size) = (512, 1024);
    Ok(config)
}

impl BenchQnn {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        use CacheLayoutChoice::{Ring, Roll};
        use LayerKind::{Full, Sliding};
        let soc = Soc::find(&self.soc)?;
        let mut config = match self.model.as_str() {
            "small" => small()?,
            name => ModelShape::named(name)?.config,
        };
        let find = |kind| config.layer_types.iter().position(|known| *known == kind);
        let needed = find(Sliding).max(find(Full)).map_or(0, |last| last + 1);
        let windows = find(Sliding).is_some();
        if find(Full).is_none() {
            bail!("--model {}: a full layer is needed", self.model);
        }
        // Rows of the vocabulary are no part of a layer.
        config.vocab_size = config.vocab_size.min(VOCABULARY);
        let config = config.with_layers(needed)?;
        let weights = RandomWeights { dtype: DType::F32, ..RandomWeights::default() };
        let checkpoint = Checkpoint::random(config, weights);
        let scratch = tempfile::tempdir()?;
        let case = |kind, layout, form| Spelling { kind, layout, form };
        let full = |kv| case(Full, Roll, Form::Integers(kv));
        let normed =
            |form| if windows { case(Sliding, Ring, form) } else { case(Full, Roll, form) };
        let rolled = |layout| case(Sliding, layout, Form::Integers(GraphKv::S16));
        let mut compared = Vec::new();
        if windows {
            compared.push(("ring / roll", rolled(Ring), rolled(Roll)));
        }
        compared.extend([
            ("norms fused / decomposed", normed(Form::Half), normed(Form::Decomposed)),
            ("s16 / f16 keys and values", full(GraphKv::S16), full(GraphKv::F16)),
            ("s8 / s16 keys and values", full(GraphKv::S8), full(GraphKv::S16)),
            ("u8 / s16 keys and values", full(GraphKv::U8), full(GraphKv::S16)),
        ]);
        let mut spellings: Vec<Spelling> = Vec::new();
        for spelling in compared.iter().flat_map(|(_, after, before)| [*before, *after]) {
            if !spellings.contains(&spelling) {
                spellings.push(spelling);
            }
        }
        let mut cases = Vec::with_capacity(spellings.len());
        for (index, spelling) in spellings.iter().enumerate() {
            printer.talk(&format!("compiling {}", spelling.name()));
            let folder = scratch.path().join(index.to_string());
            cases.push(self.case(&checkpoint, *spelling, soc, &folder)?);
        }
        let known = |spelling| spellings.iter().position(|other| *other == spelling);
        let gain = |(what, after, before): (&'static str, Spelling, Spelling)| {
            let (after, before) = (cases.get(known(after)?)?, cases.get(known(before)?)?);
            let ratio = |part: fn(&Case) -> u64| part(after) as f64 / part(before).max(1) as f64;
            Some(Gain {
                what,
                qnn_ops: ratio(|case| case.qnn_ops as u64),
                htp_ops: ratio(|case| case.total.htp_ops),
                dram: ratio(|case| dram(&case.total)),
                vtcm: ratio(|case| vtcm(&case.total)),
            })
        };
        let gains = compared.into_iter().filter_map(gain).collect();
        let report = Report { soc: soc.name.to_owned(), context: self.context, cases, gains };
        match self.json {
            true => printer.json(&report)?,
            false => print(&report, printer)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn case(
        &self,
        checkpoint: &Checkpoint,
        spelling: Spelling,
        soc: Soc,
        folder: &Path,
    ) -> anyhow::Result<Case> {
        let mut layers = checkpoint.config().layer_types.iter();
        let layer = layers.position(|kind| *kind == spelling.kind).unwrap_or(0);
        let mut options = ExportOptions {
            tokens: 1,
            context: self.context,
            layers: layer..layer + 1,
            cache_layout: spelling.layout,
            logits: Logits::Hidden,
            gelu: Gelu::Exact,
            precision: Precision::Fp16,
            dialect: Dialect::Qnn,
            head_shards: 1,
        };
        let mut allow = BTreeSet::new();
        let artifact = match spelling.form {
            Form::Integers(kv) => {
                options.precision = Precision::Fp32;
                integers(checkpoint, &options, kv, folder)?
            }
            form => {
                if matches!(form, Form::Decomposed) {
                    options.dialect = Dialect::Portable;
                    allow.extend(Rule::ALL);
                }
                let request = ExportRequest {
                    checkpoint,
                    options,
                    embedding: false,
                    random_seed: Some(0),
                    force: false,
                    threads: threads(),
                };
                export(&request, folder, &|_, _| {})?
            }
        };
        let compile_options = CompileOptions {
            soc,
            performance: Performance::Default,
            split: Split::Parts(1),
            share_weights: false,
            allow,
            limits: self.ort.limits(),
            library: self.ort.ort.clone(),
            worker: worker_command()?,
            cache: cache_root()?.join("compiled"),
            force: false,
        };
        let out = folder.with_extension("compiled");
        let compiled = compile(&[artifact], &compile_options, &out, &mut |_| {})
            .with_context(|| spelling.name())?;
        let part = compiled.manifest().steps.first().and_then(|step| step.parts.first());
        let part = part.context("nothing was compiled")?;
        let Audit { qnn_ops, schematic, .. } = &part.audit;
        let schematic = schematic.as_ref().context("the compiler gave no account")?;
        let mut norms = Traffic::default();
        for node in schematic.nodes.iter().filter(|node| is_norm(node)) {
            norms.add(node.traffic);
        }
        Ok(Case {
            name: spelling.name(),
            qnn_ops: qnn_ops.values().sum(),
            total: schematic.total,
            norms,
            binary_bytes: part.binary_bytes,
        })
    }
}

/// Rows of the embedding.
const VOCABULARY: usize = 256;

/// Whether a node belongs to a norm of a layer.
fn is_norm(node: &NodeTraffic) -> bool {
    let part = node.tag.map(|tag| tag.part);
    matches!(part, Some(Part::AttentionNorm | Part::HeadNorm | Part::MlpNorm))
}

/// The artifact of a step in integers with ranges that are made up.
fn integers(
    checkpoint: &Checkpoint,
    options: &ExportOptions,
    kv: GraphKv,
    folder: &Path,
) -> anyhow::Result<Artifact> {
    let scheme = Scheme::W8A16;
    let step = build(checkpoint, options)?;
    let matrices = plan(&step, &SchemeOptions { scheme, kv: Some(kv), width: &|_| None })?;
    let formats = ValueFormats { activations: scheme.activations(), kv };
    let quantized =
        quantize(&step, &matrices, RangeSource::Uncalibrated, formats, &|matrix, values, bits| {
            round_nearest(values, matrix.rows, matrix.columns, bits)
        })?;
    let mut draft = Draft::of_checkpoint(checkpoint, options, &quantized.graphs, None)?;
    draft.model.random_seed = Some(0);
    draft.quantization = Some(Quantization {
        scheme: scheme.to_string(),
        kv: kv.to_string(),
        calibrated: false,
        calibration_texts: Vec::new(),
        ranges_sha256: None,
        ports: quantized.ports.clone(),
        weights: quantized.weights.clone(),
        bits_per_weight: quantized.bits_per_weight,
    });
    let how = Write { force: false, threads: threads() };
    Ok(write_artifact(&draft, folder, how, &|_, _| {})?)
}

fn dram(traffic: &Traffic) -> u64 {
    traffic.dram_read.saturating_add(traffic.dram_write)
}

fn vtcm(traffic: &Traffic) -> u64 {
    traffic.vtcm_read.saturating_add(traffic.vtcm_write)
}

fn print(report: &Report, printer: &mut Printer) -> anyhow::Result<()> {
    printer.line(format!(
        "planned for one layer and step on {}, context {}: nothing was executed",
        report.soc, report.context
    ))?;
    let mib = |bytes: u64| format!("{:.3}", bytes as f64 / f64::from(1 << 20));
    let titles = [
        "layer",
        "QNN ops",
        "HTP ops",
        "of norms",
        "DRAM MiB read",
        "written",
        "VTCM MiB",
        "binary MiB",
    ];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    for case in &report.cases {
        rows.push(vec![
            case.name.clone(),
            case.qnn_ops.to_string(),
            case.total.htp_ops.to_string(),
            case.norms.htp_ops.to_string(),
            mib(case.total.dram_read),
            mib(case.total.dram_write),
            mib(vtcm(&case.total)),
            mib(case.binary_bytes),
        ]);
    }
    table(&rows).iter().try_for_each(|line| printer.line(line))?;
    let mut rows = vec![["", "QNN ops", "HTP ops", "DRAM", "VTCM"].map(str::to_owned).to_vec()];
    for gain in &report.gains {
        let ratios = [gain.qnn_ops, gain.htp_ops, gain.dram, gain.vtcm];
        let mut row = vec![gain.what.to_owned()];
        row.extend(ratios.map(|ratio| format!("{ratio:.3}")));
        rows.push(row);
    }
    Ok(table(&rows).iter().try_for_each(|line| printer.line(line))?)
}
