use super::compile::print_compiled;
use crate::printer::{Printer, mebibytes, table};
use firesteel_model::{ModelShape, PathKind};

use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_artifact::{Artifact, Manifest};
use firesteel_checkpoint::{Checkpoint, Head, LayerKind, ModelConfig, Weight};
use firesteel_compile::Compiled;
use firesteel_engine::{KvFormat, KvMemory, SequenceOptions};
use firesteel_profile::{ModelBytes, WeightCoding, WeightCount};
use firesteel_step::{CacheLayoutChoice, Encoding, PortEncoding, kv_bytes};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

/// Show what a checkpoint, a config.json, an artifact or a compiled artifact is.
#[derive(Debug, Args)]
pub(crate) struct Inspect {
    /// Checkpoint folder, GGUF file, config.json, artifact or compiled artifact
    path: PathBuf,
    /// Contexts to give the KV cache's memory for
    #[arg(long, value_name = "N,N,…", value_delimiter = ',')]
    #[arg(default_values_t = [4096, 32768, 131_072, 1_048_576])]
    context: Vec<usize>,
    /// Read all files of an artifact and compare them with their hashes
    #[arg(long)]
    verify: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a model is.
#[derive(Debug, Serialize)]
struct Report {
    path: String,
    model_type: String,
    hidden_size: usize,
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    layer_kinds: Vec<KindReport>,
    layers: Vec<LayerReport>,
    /// `tied`, `stored`, or null for a config without weights.
    head: Option<&'static str>,
    /// Element type of each stored tensor and how many have it; null without weights.
    dtypes: Option<BTreeMap<String, usize>>,
    parameters: u64,
    weight_bytes: WeightBytes,
    kv: Vec<KvReport>,
    warnings: Vec<String>,
}

/// Layers of one kind.
#[derive(Debug, Serialize)]
struct KindReport {
    kind: LayerKind,
    count: usize,
    window: Option<usize>,
    rope_theta: Option<f64>,
    rotary_dims: Option<usize>,
}

/// One layer.
#[derive(Debug, Serialize)]
struct LayerReport {
    layer: usize,
    kind: LayerKind,
    window: Option<usize>,
    rope_theta: Option<f64>,
    rotary_dims: Option<usize>,
    /// Name, element type and shape of each weight; empty without weights.
    weights: Vec<WeightReport>,
}

#[derive(Debug, Serialize)]
struct WeightReport {
    name: String,
    dtype: String,
    shape: Vec<usize>,
}

/// Bytes of all weights in each format.
#[derive(Debug, Serialize)]
struct WeightBytes {
    /// As stored; null without weights.
    stored: Option<u64>,
    f32: u64,
    f16: u64,
    /// Matrices in 8 bits with an f32 scale a row, gates and norms in 16 bits.
    int8_per_row: u64,
    /// Matrices in 4 bits with an f32 scale a row, gates and norms in 16 bits.
    int4_per_row: u64,
}

/// KV cache of one sequence: of the step contract with 16-bit entries, and of the cpu runner.
#[derive(Debug, Serialize)]
struct KvReport {
    context: usize,
    bytes_per_element: usize,
    ring: LayoutBytes,
    roll: LayoutBytes,
    all_full: LayoutBytes,
    cpu: CpuKv,
}

/// What the cpu runner allocates for a sequence, by the format of its keys and values; null where
/// the heads do not fit the format.
#[derive(Debug, Serialize)]
struct CpuKv {
    f32: Option<CpuKvBytes>,
    f16: Option<CpuKvBytes>,
    q8: Option<CpuKvBytes>,
}

#[derive(Debug, Serialize)]
struct CpuKvBytes {
    /// Rings with room for a forward, and caches as long as the context.
    caches: usize,
    /// What a conversation adds at most, to come back to where turns begin.
    marks: usize,
}

impl CpuKv {
    fn new(config: &ModelConfig, context: usize) -> Self {
        let bytes = |kv| {
            let KvMemory { caches, marks } = SequenceOptions { context, kv }.memory(config)?;
            Some(CpuKvBytes { caches, marks })
        };
        Self { f32: bytes(KvFormat::F32), f16: bytes(KvFormat::F16), q8: bytes(KvFormat::Q8) }
    }
}

#[derive(Debug, Serialize)]
struct LayoutBytes {
    bytes: u64,
    mib: f64,
}

impl LayoutBytes {
    fn new(bytes: u64) -> Self {
        Self { bytes, mib: bytes as f64 / f64::from(1 << 20) }
    }
}

/// Bytes of a cache element in the report.
const KV_ELEMENT_BYTES: usize = 2;

impl Inspect {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        match PathKind::of(&self.path)? {
            PathKind::Compiled => {
                let compiled = Compiled::open(&self.path)?;
                if self.verify {
                    compiled.verify()?;
                    printer.talk("all files are what was written");
                }
                if self.json {
                    printer.json(compiled.manifest())?;
                } else {
                    print_compiled(&compiled, printer)?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            PathKind::Artifact => {
                let artifact = Artifact::open(&self.path)?;
                if self.verify {
                    artifact.verify()?;
                    printer.talk("all files are what was written");
                }
                if self.json {
                    printer.json(artifact.manifest())?;
                } else {
                    print_artifact(artifact.manifest(), printer)?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            _ => {}
        }
        if self.verify {
            bail!(
                "--verify goes with an artifact, whose manifest has the hashes of its files; {} \
                 is none",
                self.path.display()
            );
        }
        let ModelShape { config, checkpoint, warnings } = ModelShape::open(&self.path)?;
        let report = self.report(&config, checkpoint.as_ref(), warnings)?;
        if self.json {
            printer.json(&report)?;
        } else {
            print_model(&report, printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn report(
        &self,
        config: &ModelConfig,
        checkpoint: Option<&Checkpoint>,
        warnings: Vec<String>,
    ) -> anyhow::Result<Report> {
        let window = |kind| if kind == LayerKind::Sliding { config.sliding_window } else { None };
        let layer_kinds = LayerKind::ALL
            .into_iter()
            .map(|kind| KindReport {
                kind,
                count: config.layer_types.iter().filter(|k| **k == kind).count(),
                window: window(kind),
                rope_theta: config.rope(kind).map(|rope| rope.theta),
                rotary_dims: config.rope(kind).map(|rope| rope.dims),
            })
            .filter(|kind| kind.count > 0)
            .collect();
        let layers = config
            .layer_types
            .iter()
            .enumerate()
            .map(|(layer, &kind)| LayerReport {
                layer,
                kind,
                window: window(kind),
                rope_theta: config.rope(kind).map(|rope| rope.theta),
                rotary_dims: config.rope(kind).map(|rope| rope.dims),
                weights: checkpoint
                    .and_then(|checkpoint| checkpoint.layers().get(layer))
                    .map(|weights| weights.all().iter().map(weight_report).collect())
                    .unwrap_or_default(),
            })
            .collect();
        let stored_head = checkpoint.map_or(!config.tie_word_embeddings, |checkpoint| {
            matches!(checkpoint.head(), Head::Stored(_))
        });
        let count =
            WeightCount::model(config, stored_head).context("the model's size overflows")?;
        let mut kv = Vec::new();
        for &context in &self.context {
            let bytes = |layout| {
                kv_bytes(config, 0..config.num_layers(), context, layout, KV_ELEMENT_BYTES)
                    .with_context(|| format!("--context {context}: the KV bytes overflow"))
            };
            let (ring, roll) = (bytes(CacheLayoutChoice::Ring)?, bytes(CacheLayoutChoice::Roll)?);
            kv.push(KvReport {
                context,
                bytes_per_element: KV_ELEMENT_BYTES,
                ring: LayoutBytes::new(ring.hybrid),
                roll: LayoutBytes::new(roll.hybrid),
                all_full: LayoutBytes::new(roll.uniform),
                cpu: CpuKv::new(config, context),
            });
        }
        Ok(Report {
            path: self.path.display().to_string(),
            model_type: config.family.model_type().to_owned(),
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_position_embeddings,
            rms_norm_eps: config.rms_norm_eps,
            layer_kinds,
            layers,
            head: checkpoint.map(|_| if stored_head { "stored" } else { "tied" }),
            dtypes: checkpoint.map(dtypes),
            parameters: count.parameters(),
            weight_bytes: WeightBytes {
                stored: checkpoint.map(|checkpoint| ModelBytes::stored(checkpoint).total()),
                f32: count.bytes(WeightCoding::F32),
                f16: count.bytes(WeightCoding::F16),
                int8_per_row: count.bytes(WeightCoding::Int8PerRow),
                int4_per_row: count.bytes(WeightCoding::Int4PerRow),
            },
            kv,
            warnings,
        })
    }
}

fn weight_report(weight: &Weight) -> WeightReport {
    WeightReport {
        name: weight.name().to_owned(),
        dtype: weight.format().to_string(),
        shape: weight.shape().to_vec(),
    }
}

/// All weights of a checkpoint, a stored head included.
fn weights(checkpoint: &Checkpoint) -> Vec<&Weight> {
    let mut weights = vec![checkpoint.embedding(), checkpoint.final_norm()];
    weights.extend(checkpoint.layers().iter().flat_map(|layer| layer.all()));
    if let Head::Stored(head) = checkpoint.head() {
        weights.push(head);
    }
    weights
}

fn dtypes(checkpoint: &Checkpoint) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for weight in weights(checkpoint) {
        *counts.entry(weight.format().to_string()).or_insert(0) += 1;
    }
    counts
}

fn print_model(report: &Report, printer: &mut Printer) -> anyhow::Result<()> {
    for warning in &report.warnings {
        printer.warn(warning);
    }
    printer.line(format!("{}: {}", report.path, report.model_type))?;
    printer.line(format!(
        "{} parameters, hidden {}, feed-forward {}, {} heads over {} key/value heads of {}, \
         vocabulary {}, up to {} positions",
        report.parameters,
        report.hidden_size,
        report.intermediate_size,
        report.num_attention_heads,
        report.num_key_value_heads,
        report.head_dim,
        report.vocab_size,
        report.max_position_embeddings,
    ))?;
    let dash = || "-".to_owned();
    let mut rows = vec![
        ["layers", "count", "window", "rope theta", "rotary dims"].map(str::to_owned).to_vec(),
    ];
    for kind in &report.layer_kinds {
        rows.push(vec![
            kind.kind.to_string(),
            kind.count.to_string(),
            kind.window.map_or_else(dash, |window| window.to_string()),
            kind.rope_theta.map_or_else(dash, |theta| theta.to_string()),
            kind.rotary_dims.map_or_else(dash, |dims| format!("{dims} of {}", report.head_dim)),
        ]);
    }
    print_table(&rows, printer)?;
    if let (Some(head), Some(dtypes)) = (report.head, &report.dtypes) {
        let dtypes: Vec<String> =
            dtypes.iter().map(|(dtype, count)| format!("{count} in {dtype}")).collect();
        printer.line(format!("head {head}; weights: {}", dtypes.join(", ")))?;
        let mut rows = vec![["layer", "weight", "dtype", "shape"].map(str::to_owned).to_vec()];
        for kind in &report.layer_kinds {
            let Some(layer) = report.layers.iter().find(|layer| layer.kind == kind.kind) else {
                continue;
            };
            for weight in &layer.weights {
                let name = weight.name.trim_start_matches("model.layers.");
                let name = name.split_once('.').map_or(name, |(_, name)| name);
                rows.push(vec![
                    format!("{} ({})", layer.layer, layer.kind),
                    name.to_owned(),
                    weight.dtype.clone(),
                    format!("{:?}", weight.shape),
                ]);
            }
        }
        print_table(&rows, printer)?;
    }
    let bytes = &report.weight_bytes;
    let mut rows = vec![["weights", "bytes", "MiB"].map(str::to_owned).to_vec()];
    let formats = [
        ("stored", bytes.stored),
        ("f32", Some(bytes.f32)),
        ("f16, bf16", Some(bytes.f16)),
        ("int8 per row", Some(bytes.int8_per_row)),
        ("int4 per row", Some(bytes.int4_per_row)),
    ];
    for (name, bytes) in formats {
        if let Some(bytes) = bytes {
            rows.push(vec![name.into(), bytes.to_string(), mebibytes(bytes)]);
        }
    }
    print_table(&rows, printer)?;
    let titles = ["KV at 16 bits", "ring", "", "roll", "", "all layers full", ""];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    for kv in &report.kv {
        let mut row = vec![format!("context {}", kv.context)];
        for layout in [&kv.ring, &kv.roll, &kv.all_full] {
            row.extend([layout.bytes.to_string(), mebibytes(layout.bytes)]);
        }
        rows.push(row);
    }
    print_table(&rows, printer)?;
    let titles = ["KV of the cpu runner", "f16", "", "f32", "", "q8", "", "marks at f16", ""];
    let mut rows = vec![titles.map(str::to_owned).to_vec()];
    for KvReport { context, cpu, .. } in &report.kv {
        let mut row = vec![format!("context {context}")];
        let caches = [&cpu.f16, &cpu.f32, &cpu.q8].map(|kv| kv.as_ref().map(|kv| kv.caches));
        for bytes in caches.into_iter().chain([cpu.f16.as_ref().map(|kv| kv.marks)]) {
            row.push(bytes.map_or_else(dash, |bytes| bytes.to_string()));
            row.push(bytes.map_or_else(String::new, |bytes| mebibytes(bytes as u64)));
        }
        rows.push(row);
    }
    print_table(&rows, printer)
}

fn print_artifact(manifest: &Manifest, printer: &mut Printer) -> anyhow::Result<()> {
    let step = &manifest.step;
    printer.line(format!(
        "artifact of {}, {} dialect, opset {}, {} values",
        manifest.model.model_type, manifest.options.dialect, manifest.opset, step.dtype
    ))?;
    printer.line(format!(
        "layers {}..{} of {}, context {}, {} token{} a step, head {}",
        step.first_layer,
        step.first_layer + step.layers.len(),
        manifest.model.num_layers,
        step.context,
        step.tokens,
        if step.tokens == 1 { "" } else { "s" },
        match manifest.head {
            None => "left out",
            Some(firesteel_artifact::HeadSource::Tied) => "tied",
            Some(firesteel_artifact::HeadSource::Stored) => "stored",
        }
    ))?;
    if let Some(seed) = manifest.model.random_seed {
        printer.line(format!("random weights (seed {seed}): for profiling only"))?;
    }
    if let Some(known) = &manifest.quantization {
        printer.line(format!(
            "quantized: {} with {} keys and values, {:.2} bits a weight, {}",
            known.scheme,
            known.kv,
            known.bits_per_weight,
            match (known.calibrated, known.calibration_texts.is_empty()) {
                (false, _) => "UNCALIBRATED: its numbers are wrong".to_owned(),
                (true, true) => "calibrated on ids without a text".to_owned(),
                (true, false) => format!("calibrated on {}", known.calibration_texts.join(", ")),
            }
        ))?;
        for PortEncoding { name, encoding } in &known.ports {
            let Encoding { dtype, scale, zero_point } = encoding;
            let numbers = format!("{dtype}, scale {scale:e}, zero point {zero_point}");
            printer.line(format!("{name} in the graph: {numbers}"))?;
        }
    }
    let mut rows = vec![["tensor", "dtype", "shape"].map(str::to_owned).to_vec()];
    for tensor in step.inputs.iter().chain(&step.outputs) {
        rows.push(vec![
            tensor.name.clone(),
            tensor.dtype.to_string(),
            format!("{:?}", tensor.shape),
        ]);
    }
    print_table(&rows, printer)?;
    if !manifest.unused_inputs.is_empty() {
        printer.line(format!("not in this slice: {}", manifest.unused_inputs.join(", ")))?;
    }
    printer.line(format!("wide tensors: {}", manifest.wide.reason))?;
    for graph in &manifest.graphs {
        let counts: Vec<String> =
            graph.op_counts.iter().map(|(op, count)| format!("{count} {op}")).collect();
        printer.line(format!("{}: {}", graph.file, counts.join(", ")))?;
    }
    for data in &manifest.data {
        printer.line(format!("{}: {} bytes, {}", data.file, data.bytes, mebibytes(data.bytes)))?;
    }
    let kv = &manifest.kv_bytes;
    printer.line(format!(
        "KV at 16 bits: {} bytes, {}; all layers full: {} bytes, {}; this graph's inputs: {} bytes",
        kv.hybrid,
        mebibytes(kv.hybrid),
        kv.uniform,
        mebibytes(kv.uniform),
        kv.graph_inputs
    ))?;
    Ok(())
}

fn print_table(rows: &[Vec<String>], printer: &mut Printer) -> anyhow::Result<()> {
    for line in table(rows) {
        printer.line(line)?;
    }
    Ok(())
}
