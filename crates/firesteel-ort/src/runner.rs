use crate::qnn::HtpModel;
use crate::session::TensorModel;
use crate::{OrtError, OrtModel, OrtOptions, Port};
use firesteel_step::{Runner, RunnerError, StepInputs, StepOutputs, StepSpec, TensorSpec};
use firesteel_tensor::Tensor;
use std::path::Path;

/// Executes steps of an ONNX file with ONNX Runtime, on the CPU or on the emulator of the HTP.
#[derive(Debug)]
pub struct OrtRunner {
    name: &'static str,
    spec: StepSpec,
    model: Box<dyn TensorModel>,
    /// Position in the graph of each output of the contract.
    output_order: Vec<usize>,
}

impl OrtRunner {
    /// Opens the ONNX file `model`, with external data beside it, for steps of `spec`.
    ///
    /// # Errors
    /// As [`OrtModel::open`]; also when the inputs and outputs are not exactly those of `spec`, in
    /// any order: the error names the first difference.
    pub fn open(model: &Path, spec: StepSpec, options: &OrtOptions) -> Result<Self, OrtError> {
        Self::new("ort", Box::new(OrtModel::open(model, options)?), spec)
    }

    /// Opens a model from its bytes; `folder_for_external_data` is where its data files are. This
    /// is the way to run a graph that was changed in memory, such as one with more outputs.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`OrtModel::from_bytes`].
    pub fn from_bytes(
        model_bytes: &[u8],
        folder_for_external_data: &Path,
        spec: StepSpec,
        options: &OrtOptions,
    ) -> Result<Self, OrtError> {
        let model = OrtModel::from_bytes(model_bytes, folder_for_external_data, options)?;
        Self::new("ort", Box::new(model), spec)
    }

    /// Takes a compiled model on the emulator for steps of `spec`.
    ///
    /// # Errors
    /// When the inputs and outputs are not exactly those of `spec`.
    pub fn on_htp(model: HtpModel, spec: StepSpec) -> Result<Self, OrtError> {
        Self::new("htp", Box::new(model), spec)
    }

    fn new(
        name: &'static str,
        model: Box<dyn TensorModel>,
        spec: StepSpec,
    ) -> Result<Self, OrtError> {
        matching(model.name(), "input", &spec.inputs, model.inputs())?;
        let output_order = matching(model.name(), "output", &spec.outputs, model.outputs())?;
        Ok(Self { name, spec, model, output_order })
    }
}

/// For each tensor of the contract, the position of the port of its name.
fn matching(
    model: &str,
    side: &'static str,
    specs: &[TensorSpec],
    ports: &[Port],
) -> Result<Vec<usize>, OrtError> {
    let differs = |name: &str, expected: String, actual: String| {
        let name = name.to_owned();
        OrtError::Port { model: model.to_owned(), side, name, expected, actual }
    };
    let mut order = Vec::with_capacity(specs.len());
    for spec in specs {
        let expected = || format!("{} {:?} by the step contract", spec.dtype, spec.shape);
        let Some(index) = ports.iter().position(|port| port.name == spec.name) else {
            let names: Vec<&str> = ports.iter().map(|port| port.name.as_str()).collect();
            let found = format!("only {}", names.join(", "));
            return Err(differs(&spec.name, expected(), found));
        };
        let port = &ports[index];
        let fixed = port.shape.iter().all(Option::is_some);
        if !fixed || !port.accepts(spec.dtype, &spec.shape) {
            return Err(differs(&spec.name, expected(), format!("{port} in the model")));
        }
        order.push(index);
    }
    match ports.iter().find(|port| !specs.iter().any(|spec| spec.name == port.name)) {
        None => Ok(order),
        Some(port) => Err(differs(
            &port.name,
            format!("no {side} of that name by the step contract"),
            format!("{port} in the model"),
        )),
    }
}

impl Runner for OrtRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        self.name
    }

    fn settings(&self) -> Vec<(String, String)> {
        self.model.settings().to_vec()
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        // The inputs may have been made for another contract.
        let inputs = StepInputs::new(&self.spec, inputs.tensors().to_vec())?;
        let named: Vec<_> = self
            .spec
            .inputs
            .iter()
            .zip(inputs.tensors())
            .map(|(spec, view)| (spec.name.as_str(), *view))
            .collect();
        let results = self.model.run(&named).map_err(|error| RunnerError::Failed {
            runner: self.name.into(),
            message: error.to_string(),
        })?;
        let ordered: Vec<Tensor> =
            self.output_order.iter().filter_map(|i| results.get(*i).cloned()).collect();
        Ok(StepOutputs::new(&self.spec, ordered)?)
    }
}
