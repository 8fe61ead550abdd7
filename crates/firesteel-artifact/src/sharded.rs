use firesteel_step::{Logits, Role, Runner, RunnerError, StepInputs, StepOutputs, StepSpec};
use firesteel_tensor::{Tensor, TensorView};

/// A part of the vocabulary projection: logits [1, n] or [1, T, n] from the hidden state
/// [1, T, H].
pub type HeadRunner = Box<dyn FnMut(TensorView<'_>) -> Result<Tensor, RunnerError>>;

/// A step without a head and the parts of its head, as one runner with logits.
pub struct ShardedRunner {
    step: Box<dyn Runner>,
    heads: Vec<HeadRunner>,
    spec: StepSpec,
}

impl ShardedRunner {
    /// Joins `step`, whose first output is the hidden state, and the `heads`, in order of their
    /// vocabulary rows, to a runner with `logits`.
    ///
    /// # Errors
    /// When the geometry is impossible.
    pub fn new(
        step: Box<dyn Runner>,
        heads: Vec<HeadRunner>,
        logits: Logits,
    ) -> Result<Self, RunnerError> {
        let mut spec = step.spec().with_logits(logits)?;
        // Values after layers keep the names that the step has for them.
        for output in &mut spec.outputs {
            if let Some(named) = step.spec().outputs.iter().find(|t| t.role == output.role) {
                output.name.clone_from(&named.name);
            }
        }
        Ok(Self { step, heads, spec })
    }

    /// Logits of all rows from the parts, each [.., n].
    fn join(&self, parts: &[Tensor]) -> Result<Tensor, RunnerError> {
        let Some(declared) = self.spec.outputs.iter().find(|t| t.role == Role::Logits) else {
            return Err(self.fail("the contract has no logits".into()));
        };
        let tokens = declared.shape[..declared.shape.len() - 1].iter().product();
        let mut joined = Vec::new();
        for token in 0..tokens {
            for part in parts {
                let values = part.view().to_f32().map_err(firesteel_step::StepError::from)?;
                let width = values.len() / tokens;
                joined.extend_from_slice(&values[token * width..(token + 1) * width]);
            }
        }
        Tensor::from_f32_as(declared.dtype, declared.shape.clone(), joined)
            .map_err(|error| self.fail(format!("logits of the parts: {error}")))
    }

    fn fail(&self, message: String) -> RunnerError {
        RunnerError::Failed { runner: self.step.name().to_owned(), message }
    }
}

impl Runner for ShardedRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        self.step.name()
    }

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = self.step.settings();
        settings.push(("head graphs".into(), self.heads.len().to_string()));
        settings
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let inner = self.step.step(inputs)?;
        let hidden = inner
            .get(self.step.spec(), Role::Hidden)
            .ok_or_else(|| self.fail("the step returns no hidden state".into()))?;
        let mut parts = Vec::with_capacity(self.heads.len());
        for head in &mut self.heads {
            parts.push(head(hidden.view())?);
        }
        let logits = self.join(&parts)?;
        let mut tensors = Vec::with_capacity(self.spec.outputs.len());
        for output in &self.spec.outputs {
            tensors.push(match output.role {
                Role::Logits => logits.clone(),
                role => inner
                    .get(self.step.spec(), role)
                    .cloned()
                    .ok_or_else(|| self.fail(format!("the step returns no {}", output.name)))?,
            });
        }
        Ok(StepOutputs::new(&self.spec, tensors)?)
    }
}
