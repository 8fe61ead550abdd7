use firesteel_graph::{Evaluator, Graph, GraphError};
use firesteel_step::{Role, Runner, RunnerError, StepInputs, StepOutputs, StepSpec};

/// The graph evaluator as a runner.
#[derive(Debug)]
pub struct EvaluatorRunner {
    evaluator: Evaluator,
    spec: StepSpec,
}

impl EvaluatorRunner {
    /// A runner of `graph`, whose inputs and outputs must be those of `spec`, in order. Values
    /// after layers that the spec asks for are made outputs.
    ///
    /// # Errors
    /// When the graph and the spec differ; the error names the first difference.
    pub fn new(mut graph: Graph, spec: StepSpec) -> Result<Self, GraphError> {
        for tensor in &spec.outputs {
            if matches!(tensor.role, Role::LayerHidden(_)) {
                let id = graph.find(&tensor.name).ok_or_else(|| GraphError::Value {
                    name: tensor.name.clone(),
                    problem: "is not in the graph".into(),
                })?;
                graph.output(id)?;
            }
        }
        for (what, ids, tensors) in
            [("input", graph.inputs(), &spec.inputs), ("output", graph.outputs(), &spec.outputs)]
        {
            if ids.len() != tensors.len() {
                let problem =
                    format!("has {} {what}s, the contract has {}", ids.len(), tensors.len());
                return Err(GraphError::Value { name: graph.name().to_owned(), problem });
            }
            for (id, tensor) in ids.iter().zip(tensors) {
                let value = graph.value(*id);
                if value.name != tensor.name
                    || value.dtype != tensor.dtype
                    || value.shape != tensor.shape
                {
                    let problem = format!(
                        "{what} is {} {:?}, the contract has {} {} {:?}",
                        value.dtype, value.shape, tensor.name, tensor.dtype, tensor.shape
                    );
                    return Err(GraphError::Value { name: value.name.clone(), problem });
                }
            }
        }
        Ok(Self { evaluator: Evaluator::new(graph)?, spec })
    }
}

impl Runner for EvaluatorRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        "evaluator"
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let outputs = self.evaluator.run(inputs.tensors()).map_err(|error| {
            RunnerError::Failed { runner: "evaluator".into(), message: error.to_string() }
        })?;
        Ok(StepOutputs::new(&self.spec, outputs)?)
    }
}
