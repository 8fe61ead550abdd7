use firesteel_step::{Logits, Role, Runner, RunnerError, StepInputs, StepOutputs, StepSpec};
use firesteel_tensor::Tensor;

/// Slices of a step as one runner of all its layers, without the head.
pub(crate) struct Chain {
    slices: Vec<Box<dyn Runner>>,
    spec: StepSpec,
}

impl Chain {
    /// Joins slices of the step `whole`, in order.
    ///
    /// # Errors
    /// When the contract without a head is impossible.
    pub(crate) fn new(slices: Vec<Box<dyn Runner>>, whole: &StepSpec) -> Result<Self, RunnerError> {
        Ok(Self { slices, spec: whole.with_logits(Logits::Hidden)? })
    }
}

/// The role in the whole step of a slice's tensor; its layers begin at `first`.
fn in_whole(role: Role, first: usize) -> Role {
    match role {
        Role::KeyCache(i) => Role::KeyCache(i + first),
        Role::ValueCache(i) => Role::ValueCache(i + first),
        Role::KeyNew(i) => Role::KeyNew(i + first),
        Role::ValueNew(i) => Role::ValueNew(i + first),
        other => other,
    }
}

impl Runner for Chain {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        self.slices.first().map_or("htp", |slice| slice.name())
    }

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = self.slices.first().map(|slice| slice.settings()).unwrap_or_default();
        settings.push(("parts".into(), self.slices.len().to_string()));
        settings
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let fail = |name: &str| RunnerError::Failed {
            runner: "htp".into(),
            message: format!("a part has no {name}"),
        };
        let mut hidden: Option<Tensor> = None;
        let mut made: Vec<(Role, Tensor)> = Vec::new();
        let mut first = 0;
        for slice in &mut self.slices {
            let spec = slice.spec().clone();
            let mut views = Vec::with_capacity(spec.inputs.len());
            for tensor in &spec.inputs {
                let view = match (&hidden, tensor.role) {
                    (Some(hidden), Role::Embedding) => Some(hidden.view()),
                    (_, role) => inputs.get(&self.spec, in_whole(role, first)),
                };
                views.push(view.ok_or_else(|| fail(&tensor.name))?);
            }
            let outputs = slice.step(&StepInputs::new(&spec, views)?)?;
            for (tensor, value) in spec.outputs.iter().zip(outputs.tensors()) {
                made.push((in_whole(tensor.role, first), value.clone()));
            }
            hidden = outputs.get(&spec, Role::Hidden).cloned();
            first += spec.layers.len();
        }
        let mut tensors = Vec::with_capacity(self.spec.outputs.len());
        for output in &self.spec.outputs {
            // The hidden state of the last slice is the last that was made.
            let found = made.iter().rev().find(|(role, _)| *role == output.role);
            tensors
                .push(found.map(|(_, tensor)| tensor.clone()).ok_or_else(|| fail(&output.name))?);
        }
        Ok(StepOutputs::new(&self.spec, tensors)?)
    }
}
