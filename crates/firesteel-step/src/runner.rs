use crate::{Role, SequenceId, StepError, StepSpec};
use firesteel_tensor::{Tensor, TensorView};

/// The inputs of one step, in the order of [`StepSpec::inputs`].
#[derive(Debug, Clone)]
pub struct StepInputs<'a> {
    tensors: Vec<TensorView<'a>>,
}

impl<'a> StepInputs<'a> {
    /// Checks `tensors` against `spec`.
    ///
    /// # Errors
    /// When the number, a shape or an element type differs; the error names the input.
    pub fn new(spec: &StepSpec, tensors: Vec<TensorView<'a>>) -> Result<Self, StepError> {
        spec.check_tensors("inputs", &spec.inputs, tensors.iter().copied())?;
        Ok(Self { tensors })
    }

    /// The tensors, in the order of the contract.
    pub fn tensors(&self) -> &[TensorView<'a>] {
        &self.tensors
    }

    /// The tensor with `role`, if the step has one.
    pub fn get(&self, spec: &StepSpec, role: Role) -> Option<TensorView<'a>> {
        let index = spec.inputs.iter().position(|t| t.role == role)?;
        self.tensors.get(index).copied()
    }
}

/// The outputs of one step, in the order of [`StepSpec::outputs`].
#[derive(Debug, Clone)]
pub struct StepOutputs {
    tensors: Vec<Tensor>,
}

impl StepOutputs {
    /// Checks `tensors` against `spec`.
    ///
    /// # Errors
    /// When the number, a shape or an element type differs; the error names the output.
    pub fn new(spec: &StepSpec, tensors: Vec<Tensor>) -> Result<Self, StepError> {
        spec.check_tensors("outputs", &spec.outputs, tensors.iter().map(Tensor::view))?;
        Ok(Self { tensors })
    }

    /// The tensors, in the order of the contract.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The tensor with `role`, if the step has one.
    pub fn get(&self, spec: &StepSpec, role: Role) -> Option<&Tensor> {
        let index = spec.outputs.iter().position(|t| t.role == role)?;
        self.tensors.get(index)
    }
}

/// Why a runner failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunnerError {
    /// The inputs or outputs break the contract.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A runner cannot be used for generation.
    #[error("runner {runner}: {what} is {actual}, but generation needs {expected}")]
    Unusable {
        /// Name of the runner.
        runner: String,
        /// What does not fit.
        what: &'static str,
        /// What the runner has.
        actual: String,
        /// What is needed.
        expected: String,
    },
    /// A sequence that cannot be run.
    #[error("{sequence} is not one of the batch, or is in the same pass twice")]
    NoSequence {
        /// The sequence.
        sequence: SequenceId,
    },
    /// The runner itself failed.
    #[error("{runner}: {message}")]
    Failed {
        /// Name of the runner.
        runner: String,
        /// What happened, and where.
        message: String,
    },
}

/// Something that executes steps of one [`StepSpec`]: the CPU engine, the graph evaluator, ONNX
/// Runtime. A runner keeps no state between steps; the caches come in and go out.
pub trait Runner {
    /// The contract of this runner's steps.
    fn spec(&self) -> &StepSpec;

    /// Short name for reports, such as `engine`, `evaluator` or `ort`.
    fn name(&self) -> &str;

    /// Settings that can change numbers, as shown in reports (for example the optimization level
    /// and library version of ONNX Runtime). Empty when there are none.
    fn settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Executes one step.
    ///
    /// # Errors
    /// When the inputs break the contract or the execution fails.
    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError>;
}

impl<R: Runner + ?Sized> Runner for &mut R {
    fn spec(&self) -> &StepSpec {
        (**self).spec()
    }

    fn name(&self) -> &str {
        (**self).name()
    }

    fn settings(&self) -> Vec<(String, String)> {
        (**self).settings()
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        (**self).step(inputs)
    }
}

/// Token embeddings, which the host looks up.
pub trait Embedding {
    /// Width of a row.
    fn hidden_size(&self) -> usize;

    /// Number of rows.
    fn rows(&self) -> usize;

    /// Writes the row of each id, one after the other, as f32 into `out`.
    ///
    /// # Errors
    /// When an id has no row, or `out` has not `ids.len() * hidden_size` values.
    fn lookup(&self, ids: &[u32], out: &mut [f32]) -> Result<(), RunnerError>;
}

impl<E: Embedding + ?Sized> Embedding for &E {
    fn hidden_size(&self) -> usize {
        (**self).hidden_size()
    }

    fn rows(&self) -> usize {
        (**self).rows()
    }

    fn lookup(&self, ids: &[u32], out: &mut [f32]) -> Result<(), RunnerError> {
        (**self).lookup(ids, out)
    }
}
