use crate::log::SessionLog;
use crate::tensor::{input_value, output_tensor, port_of};
use crate::{OrtError, OrtLibrary, load};
use firesteel_tensor::{DType, Tensor, TensorView};
use fs_err as fs;
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use ort::value::Outlet;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// How far ONNX Runtime may rewrite a graph before it runs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Optimization {
    /// Nothing is fused or folded, weights of 4 and 8 bits multiply in f32, and idle threads do
    /// not spin: the settings for checking.
    #[default]
    Disabled,
    /// All of the runtime's own optimizations, with its default settings: the fastest.
    All,
}

/// How to open a model.
#[derive(Debug, Clone, Default)]
pub struct OrtOptions {
    /// The library, or a folder that holds it; looked up as [`load`] says by default.
    pub library: Option<PathBuf>,
    /// Threads within an operator, 1 to 256; the runtime's choice by default.
    pub threads: Option<usize>,
    /// How far the graph may be rewritten.
    pub optimization: Optimization,
}

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Name in the graph.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape; `None` where any length is accepted.
    pub shape: Vec<Option<usize>>,
}

impl Port {
    /// Whether a tensor of `dtype` and `shape` fits.
    pub(crate) fn accepts(&self, dtype: DType, shape: &[usize]) -> bool {
        self.dtype == dtype
            && self.shape.len() == shape.len()
            && self.shape.iter().zip(shape).all(|(own, dim)| own.is_none_or(|own| own == *dim))
    }
}

/// Element type and shape, such as `f32 [1, ?, 64]`.
impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [", self.dtype)?;
        for (i, dim) in self.shape.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            match dim {
                Some(dim) => write!(f, "{separator}{dim}")?,
                None => write!(f, "{separator}?")?,
            }
        }
        f.write_str("]")
    }
}

/// What a step is run on: named tensors in, all outputs out.
pub(crate) trait TensorModel: fmt::Debug + Send {
    /// Path of the model, for messages.
    fn name(&self) -> &str;
    /// The inputs, in graph order.
    fn inputs(&self) -> &[Port];
    /// The outputs, in graph order.
    fn outputs(&self) -> &[Port];
    /// Everything that can change numbers.
    fn settings(&self) -> &[(String, String)];
    /// Runs on tensors in any order.
    fn run(&mut self, inputs: &[(&str, TensorView<'_>)]) -> Result<Vec<Tensor>, OrtError>;
}

impl TensorModel for OrtModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    fn settings(&self) -> &[(String, String)] {
        &self.settings
    }

    fn run(&mut self, inputs: &[(&str, TensorView<'_>)]) -> Result<Vec<Tensor>, OrtError> {
        OrtModel::run(self, inputs)
    }
}

/// A graph of tensors in a session.
#[derive(Debug)]
pub struct OrtModel {
    name: String,
    session: Session,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    log: SessionLog,
    settings: Vec<(String, String)>,
}

impl OrtModel {
    /// Opens the ONNX file `model`, with external data beside it.
    ///
    /// # Errors
    /// When the library cannot be loaded, the number of threads is out of range, the file cannot
    /// be read, the runtime refuses it, or an input or output is not a tensor of a type of ours.
    pub fn open(model: &Path, options: &OrtOptions) -> Result<Self, OrtError> {
        let library = load(options.library.as_deref())?;
        let name = model.display().to_string();
        if !fs::metadata(model)?.is_file() {
            return Err(OrtError::Model { model: name, reason: "not a file".into() });
        }
        Self::create(library, name, options, |mut builder| builder.commit_from_file(model))
    }

    /// Opens a model from its bytes; `folder` is where its external data files are.
    ///
    /// # Errors
    /// As [`open`](Self::open); also when `folder` is no folder or its path is not UTF-8.
    pub fn from_bytes(
        model_bytes: &[u8],
        folder: &Path,
        options: &OrtOptions,
    ) -> Result<Self, OrtError> {
        let library = load(options.library.as_deref())?;
        let name = format!("model in memory with data in {}", folder.display());
        let refuse =
            |reason: &str| Err(OrtError::Model { model: name.clone(), reason: reason.to_owned() });
        // The runtime takes the length of a protobuf message as a signed 32-bit number.
        if i32::try_from(model_bytes.len()).is_err() {
            return refuse("the model has 2 GiB or more; weights belong in external data");
        }
        // `Path::parent` of a bare file name is empty.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let folder = fs::canonicalize(folder)?;
        if !folder.is_dir() {
            return refuse("not a folder");
        }
        let Some(folder) = folder.to_str() else {
            return refuse("the path of the folder is not UTF-8, which ONNX Runtime needs here");
        };
        Self::create(library, name.clone(), options, |builder| {
            builder
                .with_config_entry("session.model_external_initializers_file_folder_path", folder)?
                .commit_from_memory(model_bytes)
        })
    }

    fn create(
        library: &'static OrtLibrary,
        name: String,
        options: &OrtOptions,
        commit: impl FnOnce(SessionBuilder) -> ort::Result<Session>,
    ) -> Result<Self, OrtError> {
        if let Some(threads) = options.threads
            && !(1..=THREAD_LIMIT).contains(&threads)
        {
            return Err(OrtError::Threads { threads, limit: THREAD_LIMIT });
        }
        let log = SessionLog::default();
        let session = builder(library, options, &log).and_then(commit);
        Self::opened(name, session, log, settings(library, options))
    }

    /// A model from its session, or the error with what was logged.
    pub(crate) fn opened(
        name: String,
        session: ort::Result<Session>,
        log: SessionLog,
        settings: Vec<(String, String)>,
    ) -> Result<Self, OrtError> {
        let session = session.map_err(|error| OrtError::Session {
            model: name.clone(),
            action: "open the model",
            message: log.explain(error.message()),
        })?;
        log.release();
        let ports = |side, outlets: &[Outlet]| {
            let port = |outlet: &Outlet| {
                port_of(outlet).map_err(|actual| OrtError::Port {
                    model: name.clone(),
                    side,
                    name: outlet.name().to_owned(),
                    expected: "a tensor of a float, integer or bool type".into(),
                    actual,
                })
            };
            outlets.iter().map(port).collect::<Result<Vec<Port>, OrtError>>()
        };
        let inputs = ports("input", session.inputs())?;
        let outputs = ports("output", session.outputs())?;
        Ok(Self { name, session, inputs, outputs, log, settings })
    }

    /// Path of the model, or where its data is; for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The inputs, in graph order.
    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    /// The outputs, in graph order.
    pub fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    /// Everything that can change numbers: the library and how the session was made.
    pub fn settings(&self) -> &[(String, String)] {
        &self.settings
    }

    /// Runs the graph on named tensors, in any order, and returns all outputs in graph order.
    /// Inputs are borrowed without a copy where their bytes are aligned for their type.
    ///
    /// # Errors
    /// When an input is missing, unknown, given twice or of another type or shape, or the runtime
    /// fails.
    pub fn run(&mut self, inputs: &[(&str, TensorView<'_>)]) -> Result<Vec<Tensor>, OrtError> {
        check_inputs(&self.name, &self.inputs, inputs)?;
        let Self { name: model, session, outputs, log, .. } = self;
        let mut values = Vec::with_capacity(inputs.len());
        for &(name, view) in inputs {
            let value = input_value(view).map_err(|reason| OrtError::Model {
                model: model.clone(),
                reason: format!("input {name}: {reason}"),
            })?;
            values.push((name, value));
        }
        let results = session.run(values).map_err(|error| OrtError::Session {
            model: model.clone(),
            action: "run the graph",
            message: log.explain(error.message()),
        })?;
        log.release();
        let mut tensors = Vec::with_capacity(outputs.len());
        for (name, value) in results {
            let tensor = output_tensor(&value).map_err(|reason| OrtError::Model {
                model: model.clone(),
                reason: format!("output {name}: {reason}"),
            })?;
            tensors.push(tensor);
        }
        Ok(tensors)
    }
}

/// Proves that every port gets one tensor that fits, and nothing else is given.
pub(crate) fn check_inputs(
    model: &str,
    ports: &[Port],
    inputs: &[(&str, TensorView<'_>)],
) -> Result<(), OrtError> {
    let differs = |name: &str, expected: String, actual: String| {
        let model = model.to_owned();
        Err(OrtError::Port { model, side: "input", name: name.to_owned(), expected, actual })
    };
    for port in ports {
        let mut given = inputs.iter().filter(|(name, _)| *name == port.name);
        let expected = port.to_string();
        let Some((_, view)) = given.next() else {
            return differs(&port.name, expected, "nothing".into());
        };
        if given.next().is_some() {
            return differs(&port.name, expected, "more than one tensor".into());
        }
        if !port.accepts(view.dtype(), view.shape()) {
            return differs(&port.name, expected, format!("{} {:?}", view.dtype(), view.shape()));
        }
    }
    for (name, view) in inputs {
        if !ports.iter().any(|port| port.name == *name) {
            return differs(
                name,
                "no input of that name".into(),
                format!("{} {:?}", view.dtype(), view.shape()),
            );
        }
    }
    Ok(())
}

/// The runtime starts all threads at once, and with thousands does not come back for minutes.
const THREAD_LIMIT: usize = 256;

/// The one way to make a session.
fn builder(
    library: &OrtLibrary,
    options: &OrtOptions,
    log: &SessionLog,
) -> ort::Result<SessionBuilder> {
    let environment = library.environment();
    let cpu = environment
        .devices()
        .filter(|device| device.ep().is_ok_and(|name| name == "CPUExecutionProvider"));
    let mut builder = Session::builder(environment)?
        .with_logger(log.logger())?
        .with_log_level(LogLevel::Warning)?
        .with_devices(cpu, None)?
        .with_inter_threads(1)?
        .with_deterministic_compute(true)?;
    if let Some(threads) = options.threads {
        builder = builder.with_intra_threads(threads)?;
    }
    builder = match options.optimization {
        Optimization::Disabled => builder
            .with_optimization_level(GraphOptimizationLevel::Disable)?
            .with_config_entry(ACCURACY_LEVEL, ACCURACY_F32)?
            .with_intra_op_spinning(false)?,
        Optimization::All => builder.with_optimization_level(GraphOptimizationLevel::All)?,
    };
    Ok(builder)
}

/// The type that dequantized weights are multiplied in, where the runtime fuses the two.
const ACCURACY_LEVEL: &str = "session.qdq_matmulnbits_accuracy_level";
const ACCURACY_F32: &str = "1";

fn settings(library: &OrtLibrary, options: &OrtOptions) -> Vec<(String, String)> {
    let file = library.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (optimization, accuracy) = match options.optimization {
        Optimization::Disabled => ("disabled", ACCURACY_F32),
        Optimization::All => ("all", "default"),
    };
    let threads = options.threads.map_or_else(|| "default".into(), |n| n.to_string());
    [
        ("onnxruntime", library.version().unwrap_or("unknown version").to_owned()),
        ("library", file),
        ("build", library.build().to_owned()),
        ("device", "cpu".to_owned()),
        ("graph_optimization", optimization.to_owned()),
        ("qdq_matmulnbits_accuracy_level", accuracy.to_owned()),
        ("deterministic_compute", "on".to_owned()),
        ("threads", threads),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into()
}
