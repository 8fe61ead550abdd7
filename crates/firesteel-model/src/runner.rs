use crate::ModelError;
use firesteel_artifact::{Artifact, HeadRunner};
use firesteel_engine::KvFormat;
use firesteel_ort::qnn::{Limits, WorkerCommand};
use firesteel_ort::{Optimization, OrtModel, OrtOptions, OrtRunner};
use firesteel_step::{Decoder, Runner, RunnerError};
use firesteel_tensor::TensorView;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Who executes steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunnerKind {
    /// The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights.
    Cpu,
    /// The reference engine in f64, from a checkpoint.
    Engine,
    /// The graph evaluator, from an artifact.
    Evaluator,
    /// ONNX Runtime on the CPU, from an artifact.
    Ort,
    /// The emulator of the HTP, from a compiled artifact.
    Htp,
}

impl RunnerKind {
    /// All of them, those of a checkpoint first.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Engine, Self::Evaluator, Self::Ort, Self::Htp];

    /// The short name, as an option takes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Engine => "engine",
            Self::Evaluator => "evaluator",
            Self::Ort => "ort",
            Self::Htp => "htp",
        }
    }

    /// What it is and runs, in one line.
    pub const fn about(self) -> &'static str {
        match self {
            Self::Cpu => {
                "The CPU's kernels, from a checkpoint: f32, quantized products for quantized weights"
            }
            Self::Engine => "The reference engine in f64, from a checkpoint",
            Self::Evaluator => "The graph evaluator, from an artifact",
            Self::Ort => "ONNX Runtime on the CPU, from an artifact",
            Self::Htp => "The emulator of the HTP, from a compiled artifact",
        }
    }
}

/// What a sentence calls it.
impl fmt::Display for RunnerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cpu => "the CPU's kernels",
            Self::Engine => "the engine",
            Self::Evaluator => "the evaluator",
            Self::Ort => "ONNX Runtime",
            Self::Htp => "the emulator of the HTP",
        })
    }
}

impl FromStr for RunnerKind {
    type Err = String;

    /// The runner of a [name](RunnerKind::name).
    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("{name:?} is no runner; {known} are accepted")
        })
    }
}

/// Where ONNX Runtime is, and what a process of its own may use.
#[derive(Debug, Clone)]
pub struct RunnerOptions {
    /// The library, or a folder that holds it; by default looked up as [`firesteel_ort::load`] says.
    pub library: Option<PathBuf>,
    /// The program in which the emulator of the HTP works: one that calls
    /// [`firesteel_ort::qnn::serve`]. Without it nothing runs on that.
    pub worker: Option<WorkerCommand>,
    /// What that process may use.
    pub limits: Limits,
}

impl Default for RunnerOptions {
    /// The library that is found, no worker, and an hour.
    fn default() -> Self {
        let limits = Limits { memory: None, time: Duration::from_secs(3600) };
        Self { library: None, worker: None, limits }
    }
}

/// Who runs a sequence, and what it is to be able to besides one token a step.
#[derive(Debug, Clone, Copy)]
pub struct DecoderOptions<'a> {
    /// Who executes the steps.
    pub kind: RunnerKind,
    /// How.
    pub runner: &'a RunnerOptions,
    /// Tokens of a prompt that a runner takes at once.
    pub prompt: usize,
    /// Most tokens of which all logits are wanted at once; 0 or 1 for one.
    pub all_logits: usize,
    /// How the CPU's kernels store keys and values.
    pub kv: KvFormat,
}

/// A sequence to be run.
pub struct SequenceDecoder {
    /// What runs it.
    pub decoder: Box<dyn Decoder>,
    /// What is odd about that.
    pub warnings: Vec<String>,
}

impl fmt::Debug for SequenceDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceDecoder")
            .field("decoder", &self.decoder.name())
            .field("warnings", &self.warnings)
            .finish()
    }
}

/// The artifact on ONNX Runtime. What is checked runs without optimizations, the default.
///
/// # Errors
/// When the runtime is not found or refuses a graph, or the manifest names no graph.
pub fn ort_runner(
    artifact: &Artifact,
    layer_outputs: bool,
    optimization: Optimization,
    options: &RunnerOptions,
) -> Result<Box<dyn Runner>, ModelError> {
    let library = options.library.clone();
    let options = OrtOptions { library, optimization, ..OrtOptions::default() };
    let Some((first, parts)) = artifact.manifest().graphs.split_first() else {
        return Err(ModelError::Runner { problem: "the manifest names no graph".into() });
    };
    let path = artifact.graph_path(first);
    let spec = artifact.graph_spec(layer_outputs);
    let step: Box<dyn Runner> = if layer_outputs {
        // The layers' values are outputs of a copy in memory; the file stays what it is.
        let names: Vec<&str> = first.layer_hidden.iter().map(String::as_str).collect();
        let bytes = firesteel_onnx::model_with_outputs(&path, &names)?;
        Box::new(OrtRunner::from_bytes(&bytes, artifact.folder(), spec, &options)?)
    } else {
        Box::new(OrtRunner::open(&path, spec, &options)?)
    };
    let mut heads: Vec<HeadRunner> = Vec::new();
    for part in parts {
        let mut model = OrtModel::open(&artifact.graph_path(part), &options)?;
        heads.push(Box::new(move |hidden: TensorView<'_>| {
            let fail = |message: String| RunnerError::Failed { runner: "ort".into(), message };
            let outputs =
                model.run(&[("hidden", hidden)]).map_err(|error| fail(error.to_string()))?;
            outputs.into_iter().next().ok_or_else(|| fail("a head graph has no output".into()))
        }));
    }
    Ok(artifact.join(step, heads)?)
}
