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
use firesteel_checkpoint::{Block, Checkpoint, LayerKind, LayerWeights, Slot, Weight};
use firesteel_kernels::{Isa, Pool};
use firesteel_step::{RunnerError, StepSpec};
use forward::Scratch;
use matrix::Matrix;
use packed::Packed;
use std::sync::{Arc, Mutex};

/// Name of the runner in reports and errors.
const NAME: &str = "cpu";

/// A model ready for the CPU's kernels: float weights in the mapped files, quantized ones in the
/// kernels' layout, in a mapped file of their own if one can be had. Small matrices are always
/// floats, whatever their file has. Shared by any number of runners and sequences.
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
    /// Queries, keys and values: one matrix, or three.
    query_key_value: Vec<Matrix>,
    /// Gains for the heads of queries and of keys.
    head_norms: Option<[Vec<f32>; 2]>,
    head_gate: Option<Matrix>,
    attention_out: Matrix,
    post_attention_norm: Vec<f32>,
    mlp_gate: Matrix,
    mlp_up: Matrix,
    mlp_down: Matrix,
}

fn vector(weight: &Weight) -> Result<Vec<f32>, EngineError> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values)?;
    Ok(values)
}

impl Layer {
    fn new(
        kind: LayerKind,
        weights: &LayerWeights,
        block: Block,
        packed: &Packed,
    ) -> Result<Self, EngineError> {
        let weight = |slot| weights.weight(slot);
        let matrix = |slot| Matrix::new(weight(slot)?, packed);
        let gains = |slot| vector(weight(slot)?);
        let query_key_value = match weights.get(Slot::QueryKeyValue) {
            Some(fused) => vec![Matrix::new(fused, packed)?],
            None => vec![matrix(Slot::Query)?, matrix(Slot::Key)?, matrix(Slot::Value)?],
        };
        let head_norms = match block.attention.qk_norm {
            true => Some([gains(Slot::QueryNorm)?, gains(Slot::KeyNorm)?]),
            false => None,
        };
        let head_gate = match block.attention.head_gate {
            true => Some(Matrix::plain(weight(Slot::HeadGate)?)?),
            false => None,
        };
        Ok(Self {
            kind,
            input_norm: gains(Slot::InputNorm)?,
            query_key_value,
            head_norms,
            head_gate,
            attention_out: matrix(Slot::AttentionOut)?,
            post_attention_norm: gains(Slot::PostAttentionNorm)?,
            mlp_gate: matrix(Slot::MlpGate)?,
            mlp_up: matrix(Slot::MlpUp)?,
            mlp_down: matrix(Slot::MlpDown)?,
        })
    }

    /// Bytes that a token reads.
    fn bytes(&self) -> usize {
        let others = [&self.attention_out, &self.mlp_gate, &self.mlp_up, &self.mlp_down];
        let matrices = self.query_key_value.iter().chain(&self.head_gate).chain(others);
        let gains = [&self.input_norm, &self.post_attention_norm].into_iter();
        let gains = gains.chain(self.head_norms.iter().flatten());
        matrices.map(Matrix::bytes).sum::<usize>()
            + gains.map(|gains| 4 * gains.len()).sum::<usize>()
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
        let matrices = layers.iter().flat_map(LayerWeights::matrices);
        let weights = matrices.chain([checkpoint.head_weight()]);
        let unpacked = weights.filter_map(|weight| Matrix::unpacked(weight).transpose());
        let unpacked = unpacked.collect::<Result<Vec<_>, _>>()?;
        let packed = Packed::new(&checkpoint, &unpacked, &options.packed)?;
        let kinds = checkpoint.config().layer_types.iter();
        let layers = kinds.zip(layers);
        let block = checkpoint.config().family.block();
        let layers = layers.map(|(kind, weights)| Layer::new(*kind, weights, block, &packed));
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
        let layers: usize = self.layers.iter().map(Layer::bytes).sum();
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
