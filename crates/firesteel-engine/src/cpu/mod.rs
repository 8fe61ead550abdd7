//! The model on the CPU's kernels.

mod batch;
mod cache;
mod forward;
mod matrix;
mod packed;
mod runner;
mod sequence;

pub use batch::CpuBatch;
pub use cache::KvFormat;
pub use packed::{PackedCache, PackedWeights};
pub use runner::CpuRunner;
pub use sequence::{BatchEntry, CpuSequence, KvMemory, SequenceOptions};

use crate::{EngineError, fit};
use firesteel_checkpoint::{Checkpoint, LayerKind, LayerWeights, Weight};
use firesteel_kernels::{Isa, Pool};
use firesteel_step::{RunnerError, StepSpec};
use forward::Scratch;
use matrix::Matrix;
use packed::Packed;
use std::sync::{Arc, Mutex};

/// Name of the runner in reports and errors.
const NAME: &str = "cpu";

/// A model ready for the CPU's kernels: float weights in the mapped files, quantized ones in the
/// kernels' layout, in a mapped file of their own if one can be had. The head-wise gate is always
/// floats, whatever its file has. Shared by any number of runners and sequences.
pub struct CpuModel {
    checkpoint: Arc<Checkpoint>,
    isa: Isa,
    pool: Pool,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: Matrix,
    packed: PackedWeights,
    warnings: Vec<String>,
    /// Of the last forward; one that runs at the same time makes its own.
    scratch: Mutex<Scratch>,
}

/// How a [`CpuModel`] is prepared.
#[derive(Debug, Clone, Default)]
pub struct CpuOptions {
    /// Threads that compute, the caller included; one for each core by default.
    pub threads: Option<usize>,
    /// The instruction set; by default the one that FIRESTEEL_ISA names, or the best.
    pub isa: Option<Isa>,
    /// Where weights in the kernels' layout are kept.
    pub packed: PackedCache,
}

/// The weights of a layer, as the kernels take them.
struct Layer {
    kind: LayerKind,
    input_norm: Vec<f32>,
    post_attention_norm: Vec<f32>,
    qkv: Matrix,
    head_gate: Matrix,
    attention_out: Matrix,
    mlp_gate: Matrix,
    mlp_up: Matrix,
    mlp_down: Matrix,
}

/// The matrices of a layer that are used in the kernels' layout. The head-wise gate is not one of
/// them: it is small, and its inputs must not be rounded to 8 bits.
fn matrices(weights: &LayerWeights) -> [&Weight; 5] {
    [&weights.qkv, &weights.attention_out, &weights.mlp_gate, &weights.mlp_up, &weights.mlp_down]
}

fn vector(weight: &Weight) -> Result<Vec<f32>, EngineError> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values)?;
    Ok(values)
}

impl Layer {
    fn new(kind: LayerKind, weights: &LayerWeights, packed: &Packed) -> Result<Self, EngineError> {
        let [qkv, attention_out, mlp_gate, mlp_up, mlp_down] = matrices(weights);
        let matrix = |weight| Matrix::new(weight, packed);
        Ok(Self {
            kind,
            input_norm: vector(&weights.input_norm)?,
            post_attention_norm: vector(&weights.post_attention_norm)?,
            qkv: matrix(qkv)?,
            head_gate: Matrix::plain(&weights.head_gate)?,
            attention_out: matrix(attention_out)?,
            mlp_gate: matrix(mlp_gate)?,
            mlp_up: matrix(mlp_up)?,
            mlp_down: matrix(mlp_down)?,
        })
    }
}

impl CpuModel {
    /// Prepares `checkpoint` for `threads` threads, by default one for each core, with the other
    /// options at their defaults.
    ///
    /// # Errors
    /// As [`CpuModel::with_options`].
    pub fn new(
        checkpoint: Arc<Checkpoint>,
        threads: Option<usize>,
    ) -> Result<Arc<Self>, EngineError> {
        Self::with_options(checkpoint, &CpuOptions { threads, ..CpuOptions::default() })
    }

    /// Prepares `checkpoint`.
    ///
    /// # Errors
    /// When a weight cannot be read or is too large, FIRESTEEL_ISA names what this CPU lacks, or a thread cannot
    /// be had.
    pub fn with_options(
        checkpoint: Arc<Checkpoint>,
        options: &CpuOptions,
    ) -> Result<Arc<Self>, EngineError> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let layers = checkpoint.layers();
        let weights = layers.iter().flat_map(matrices).chain([checkpoint.head_weight()]);
        let unpacked = weights.filter_map(|weight| Matrix::unpacked(weight).transpose());
        let unpacked = unpacked.collect::<Result<Vec<_>, _>>()?;
        let packed = Packed::new(&checkpoint, &unpacked, &options.packed)?;
        let kinds = checkpoint.config().layer_types.iter();
        let layers = kinds.zip(layers);
        let layers = layers.map(|(kind, weights)| Layer::new(*kind, weights, &packed));
        let layers = layers.collect::<Result<_, _>>()?;
        Ok(Arc::new(Self {
            isa: options.isa.map_or_else(Isa::detect, Ok)?,
            pool: Pool::new(options.threads.unwrap_or_else(cores))?,
            layers,
            final_norm: vector(checkpoint.final_norm())?,
            head: Matrix::new(checkpoint.head_weight(), &packed)?,
            packed: packed.source,
            warnings: packed.warnings,
            checkpoint,
            scratch: Mutex::default(),
        }))
    }

    /// The checkpoint that was prepared.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// What a caller may want to say: that weights take memory because no file can keep them, and
    /// which ones take more bytes than in their file because the kernels lack their format.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Where the weights in the kernels' layout are.
    pub fn packed_weights(&self) -> PackedWeights {
        self.packed
    }

    /// Bytes of weights that one token reads: all but an embedding that is not the head too.
    pub fn weight_bytes(&self) -> u64 {
        let layer = |layer: &Layer| {
            let matrices = [
                &layer.qkv,
                &layer.head_gate,
                &layer.attention_out,
                &layer.mlp_gate,
                &layer.mlp_up,
                &layer.mlp_down,
            ];
            let norms = layer.input_norm.len() + layer.post_attention_norm.len();
            matrices.iter().map(|matrix| matrix.bytes()).sum::<usize>() + 4 * norms
        };
        let layers: usize = self.layers.iter().map(layer).sum();
        (layers + 4 * self.final_norm.len() + self.head.bytes()) as u64
    }

    /// A runner of the steps of `spec`: any T, any slice of layers, f32 or f16 tensors.
    ///
    /// # Errors
    /// When `spec` is not a step of this model; the error names the difference.
    pub fn runner(self: &Arc<Self>, spec: StepSpec) -> Result<CpuRunner, EngineError> {
        fit::check(&self.checkpoint, &spec)?;
        Ok(CpuRunner::new(Arc::clone(self), spec))
    }

    /// An empty sequence with caches of its own.
    ///
    /// # Errors
    /// When the context is 0 or too large, or the format does not fit the heads.
    pub fn sequence(
        self: &Arc<Self>,
        options: SequenceOptions,
    ) -> Result<CpuSequence, EngineError> {
        CpuSequence::new(Arc::clone(self), options)
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn settings(&self) -> Vec<(String, String)> {
        vec![("isa".into(), self.isa.name().into()), ("threads".into(), self.threads().to_string())]
    }
}

/// What a runner or a decoder tells of an error.
fn failed(error: EngineError) -> RunnerError {
    match error {
        EngineError::Step(error) => RunnerError::Step(error),
        error => RunnerError::Failed { runner: NAME.into(), message: error.to_string() },
    }
}
