use super::child::{Limits, Worker, WorkerCommand, ended};
use super::find_qnn;
use super::soc::Performance;
use super::worker::{Job, Libraries, Place, Ports, RunJob, read_frame, views, write_frame};
use crate::session::{Port, TensorModel, check_inputs};
use crate::{OrtError, QNN_SDK_VERSION, QNN_VERSION, find_library, library_version};
use firesteel_tensor::{Buffer, Tensor, TensorView};
use fs_err as fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How to run a compiled model on the emulator.
#[derive(Debug, Clone)]
pub struct HtpOptions {
    /// ONNX Runtime, or a folder that holds it; looked up as [`load`](crate::load) says by default.
    pub library: Option<PathBuf>,
    /// The program that does the work.
    pub worker: WorkerCommand,
    /// What each child process may use; the time is that of all its steps together.
    pub limits: Limits,
}

/// A compiled model on the emulator of the HTP, in a child process.
///
/// The emulator computes what the device computes, slowly: its speed says nothing about a device.
#[derive(Debug)]
pub struct HtpModel {
    name: String,
    ports: Ports,
    outputs: Vec<Place>,
    settings: Vec<(String, String)>,
    worker: Worker,
    requests: ChildStdin,
    answers: Receiver<Answer>,
    /// Time of the last run.
    last_run: Option<Duration>,
    /// The child's working directory, which it fills with files.
    _folder: TempDir,
}

/// A frame from the child, or its end.
type Answer = io::Result<Option<Result<Vec<u8>, String>>>;

/// Time between two looks at a child that computes.
const INTERVAL: Duration = Duration::from_millis(100);

impl HtpModel {
    /// Starts the emulator on the context file `context`, whose binary lies beside it.
    ///
    /// # Errors
    /// When a library is missing, the context is refused, or the child fails or is beyond a limit.
    pub fn open(context: &Path, options: &HtpOptions) -> Result<Self, OrtError> {
        let runtime = find_library(options.library.as_deref())?;
        let version = library_version(&runtime);
        let libraries = Libraries::new(runtime, &find_qnn()?);
        let context = fs::canonicalize(context)?;
        let folder = TempDir::new()?;
        let name = context.display().to_string();
        let job = Job::Run(RunJob { libraries, context, performance: Performance::Default });
        let mut worker = Worker::start(&options.worker, &job, folder.path(), true, options.limits)?;
        let (Some(requests), Some(mut stdout)) =
            (worker.child.stdin.take(), worker.child.stdout.take())
        else {
            return Err(worker.failure("has no pipes".into()));
        };
        let (sender, answers) = channel();
        std::thread::Builder::new().spawn(move || {
            loop {
                let answer = read_frame(&mut stdout);
                let last = !matches!(answer, Ok(Some(_)));
                if sender.send(answer).is_err() || last {
                    return;
                }
            }
        })?;
        let empty = Ports { inputs: Vec::new(), outputs: Vec::new() };
        let settings = [
            ("onnxruntime", version.as_deref().unwrap_or("of an unknown version")),
            ("onnxruntime-qnn", QNN_VERSION),
            ("QNN SDK", QNN_SDK_VERSION),
            ("device", "HTP emulator"),
        ];
        let mut model = Self {
            name,
            ports: empty,
            outputs: Vec::new(),
            settings: settings.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            worker,
            requests,
            answers,
            last_run: None,
            _folder: folder,
        };
        let ports = model.answer()?;
        model.ports = serde_json::from_slice(&ports)
            .map_err(|error| model.worker.failure(format!("gave no ports: {error}")))?;
        model.outputs = Place::of(&model.ports.outputs)
            .map_err(|problem| OrtError::Model { model: model.name.clone(), reason: problem })?;
        Ok(model)
    }

    /// The next frame. A child that ended or took too long is an error with what it wrote.
    fn answer(&mut self) -> Result<Vec<u8>, OrtError> {
        loop {
            match self.answers.recv_timeout(INTERVAL) {
                Ok(Ok(Some(Ok(bytes)))) => {
                    // Until the next request others work.
                    self.worker.wait();
                    return Ok(bytes);
                }
                Ok(Ok(Some(Err(message)))) => {
                    return Err(self.worker.failure(format!("failed: {message}")));
                }
                Err(RecvTimeoutError::Timeout) => self.worker.enforce()?,
                Ok(Ok(None) | Err(_)) | Err(RecvTimeoutError::Disconnected) => {
                    let status = self.worker.child.wait()?;
                    return Err(self.worker.failure(ended(status)));
                }
            }
        }
    }

    /// Time of the last run on this machine, for estimates of further runs here.
    pub fn last_run(&self) -> Option<Duration> {
        self.last_run
    }

    /// The inputs, in graph order.
    pub fn inputs(&self) -> &[Port] {
        &self.ports.inputs
    }

    /// The outputs, in graph order.
    pub fn outputs(&self) -> &[Port] {
        &self.ports.outputs
    }

    /// Runs the graph on named tensors, in any order, and returns all outputs in graph order.
    ///
    /// # Errors
    /// When an input is missing, unknown, given twice or of another type or shape, or the child
    /// fails or is beyond a limit.
    pub fn run(&mut self, inputs: &[(&str, TensorView<'_>)]) -> Result<Vec<Tensor>, OrtError> {
        check_inputs(&self.name, &self.ports.inputs, inputs)?;
        self.worker.busy();
        let started = Instant::now();
        let mut bytes = Vec::new();
        for port in &self.ports.inputs {
            let given = inputs.iter().filter(|(name, _)| *name == port.name);
            given.for_each(|(_, view)| bytes.extend_from_slice(view.bytes()));
        }
        if write_frame(&mut self.requests, Ok(&bytes)).is_err() {
            // The child is gone; what it said last is the reason.
            return Err(match self.answer() {
                Err(error) => error,
                Ok(_) => self.worker.failure("closed its input".into()),
            });
        }
        let bytes = self.answer()?;
        let outputs = views(&self.outputs, &bytes).and_then(|views| {
            let copy = |(_, view): &(&str, TensorView<'_>)| {
                Tensor::from_buffer(view.dtype(), view.shape().to_vec(), Buffer::from(view.bytes()))
            };
            views.iter().map(copy).collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())
        });
        self.last_run = Some(started.elapsed());
        outputs.map_err(|reason| OrtError::Model { model: self.name.clone(), reason })
    }
}

impl TensorModel for HtpModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn inputs(&self) -> &[Port] {
        self.inputs()
    }

    fn outputs(&self) -> &[Port] {
        self.outputs()
    }

    fn settings(&self) -> &[(String, String)] {
        &self.settings
    }

    fn run(&mut self, inputs: &[(&str, TensorView<'_>)]) -> Result<Vec<Tensor>, OrtError> {
        HtpModel::run(self, inputs)
    }
}
