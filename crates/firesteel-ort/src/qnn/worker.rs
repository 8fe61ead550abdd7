use super::library::QnnLibrary;
use super::soc::Performance;
use crate::log::SessionLog;
use crate::session::{OrtModel, Port};
use crate::{OrtError, OrtLibrary, load};
use firesteel_tensor::{DType, TensorView};
use fs_err as fs;
use ort::logging::LogLevel;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The job's description in the worker's folder.
pub(crate) const JOB: &str = "job.json";

/// The worker's answer in its folder.
pub(crate) const REPLY: &str = "reply.json";

/// Registration name of the plugin. It becomes the name of its devices and goes into the context
/// file, which loads under few names only.
const PLUGIN_NAME: &str = "QNN";

/// What a worker is to do.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Job {
    /// Compile models into contexts in the working directory.
    Compile(CompileJob),
    /// Run a context on the emulator, step by step, over standard input and output.
    Run(RunJob),
}

/// The libraries that a worker loads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Libraries {
    /// ONNX Runtime.
    pub(crate) runtime: PathBuf,
    /// The plugin.
    pub(crate) plugin: PathBuf,
    /// The HTP back end.
    pub(crate) backend: PathBuf,
}

impl Libraries {
    pub(crate) fn new(runtime: PathBuf, qnn: &QnnLibrary) -> Self {
        Self { runtime, plugin: qnn.plugin.clone(), backend: qnn.backend.clone() }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CompileJob {
    pub(crate) libraries: Libraries,
    /// Model files, and the bare names of their context files.
    pub(crate) models: Vec<(PathBuf, String)>,
    /// Number of the chip.
    pub(crate) soc: u32,
    /// Its architecture.
    pub(crate) arch: u32,
    /// Whether the compiler's own account of the graph is written.
    pub(crate) account: bool,
    /// Whether nodes may stay on the CPU, to find out which would.
    pub(crate) cpu_nodes: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RunJob {
    pub(crate) libraries: Libraries,
    /// The context file.
    pub(crate) context: PathBuf,
    pub(crate) performance: Performance,
}

impl Job {
    /// The model, for messages.
    pub(crate) fn model(&self) -> String {
        match self {
            Self::Compile(job) => {
                let names: Vec<String> =
                    job.models.iter().map(|(model, _)| model.display().to_string()).collect();
                names.join(", ")
            }
            Self::Run(job) => job.context.display().to_string(),
        }
    }

    /// What is done, for messages.
    pub(crate) fn action(&self) -> &'static str {
        match self {
            Self::Compile(_) => "compiling",
            Self::Run(_) => "the HTP emulator",
        }
    }
}

/// The answer of a worker that compiles.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reply {
    /// All contexts are written.
    Done,
    /// It failed.
    Failed(String),
}

/// Inputs and outputs of a context, the first thing that a running worker says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ports {
    pub(crate) inputs: Vec<Port>,
    pub(crate) outputs: Vec<Port>,
}

/// Does the work of a child process: the job that its parent has left in the working directory.
/// The caller's program ends after it.
///
/// # Errors
/// When there is no job, or its answer cannot be given. What goes wrong with the job itself is
/// part of the answer.
pub fn serve() -> Result<(), OrtError> {
    // A core file of gigabytes helps nobody; where the limit cannot be set, it is as it was.
    #[cfg(unix)]
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Core,
        rustix::process::Rlimit { current: Some(0), maximum: Some(0) },
    );
    let missing = |problem: String| OrtError::Model { model: JOB.into(), reason: problem };
    let text = fs::read(JOB)?;
    let job: Job = serde_json::from_slice(&text).map_err(|error| missing(error.to_string()))?;
    match job {
        Job::Compile(job) => {
            // Nobody waits for the result of a parent that was killed. Other systems tell nobody, and
            // have no such compiler.
            #[cfg(any(target_os = "linux", target_os = "android"))]
            let _ = rustix::process::set_parent_process_death_signal(Some(
                rustix::process::Signal::KILL,
            ));
            let reply = match compile(&job) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed(error.to_string()),
            };
            let text = serde_json::to_vec(&reply).map_err(io::Error::other)?;
            fs::write(REPLY, text)?;
            Ok(())
        }
        #[cfg(not(unix))]
        Job::Run(_) => Err(missing("the emulator is published for Linux alone".into())),
        #[cfg(unix)]
        Job::Run(job) => {
            // The libraries print to standard output, so answers go to a copy of it and prints go
            // where the log is.
            let answers = rustix::io::dup(rustix::stdio::stdout()).map_err(io::Error::from)?;
            rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(io::Error::from)?;
            run(&job, &mut std::fs::File::from(answers))
        }
    }
}

/// Loads ONNX Runtime and registers the plugin.
fn libraries(libraries: &Libraries) -> Result<&'static OrtLibrary, OrtError> {
    let library = load(Some(&libraries.runtime))?;
    library.environment().register_ep_library(PLUGIN_NAME, &libraries.plugin).map_err(|error| {
        OrtError::Load { path: libraries.plugin.clone(), reason: error.message().to_owned() }
    })?;
    Ok(library)
}

/// The one way to make a session on the HTP. What the provider does not know it ignores, so every
/// key is spelled here and nowhere else.
fn builder(
    library: &OrtLibrary,
    log: &SessionLog,
    options: &[(&str, &str)],
    cpu_nodes: bool,
) -> ort::Result<SessionBuilder> {
    let environment = library.environment();
    let device =
        environment.devices().filter(|device| device.ep().is_ok_and(|name| name == PLUGIN_NAME));
    let options: Vec<(String, String)> = options
        .iter()
        .map(|(key, value)| (format!("{PLUGIN_NAME}.{key}"), (*value).to_owned()))
        .collect();
    let builder = Session::builder(environment)?
        .with_logger(log.logger())?
        .with_log_level(LogLevel::Warning)?
        .with_devices(device.take(1), Some(&options))?;
    Ok(if cpu_nodes { builder } else { builder.with_disable_cpu_fallback()? })
}

/// The provider's options on which a context depends, with their values for the chip `soc` of
/// architecture `arch`. A performance mode is none of them: it is asked for by the session that
/// opens the context, and a compiler that is told any mode writes the same bytes.
pub fn compile_settings(soc: u32, arch: u32) -> [(&'static str, String); 3] {
    [
        ("soc_model", soc.to_string()),
        ("htp_arch", arch.to_string()),
        // The border's conversions belong to the graph.
        ("offload_graph_io_quantization", "0".to_owned()),
    ]
}

fn compile(job: &CompileJob) -> Result<(), OrtError> {
    let library = libraries(&job.libraries)?;
    let backend = job.libraries.backend.to_string_lossy();
    let settings = compile_settings(job.soc, job.arch);
    let account = [
        ("dump_json_qnn_graph", "1"),
        ("json_qnn_graph_dir", "."),
        ("profiling_level", "optrace"),
        ("profiling_file_path", "profile.csv"),
    ];
    let mut options = vec![("backend_path", &*backend)];
    options.extend(settings.iter().map(|(key, value)| (*key, value.as_str())));
    if job.account {
        options.extend(account);
    }
    // Sessions whose weights are shared live until the last of them has written the binary.
    let mut sessions = Vec::new();
    for (i, (model, context)) in job.models.iter().enumerate() {
        let log = SessionLog::default();
        let last = i + 1 == job.models.len();
        let make = || {
            let mut builder = builder(library, &log, &options, job.cpu_nodes)?
                .with_config_entry("ep.context_enable", "1")?
                .with_config_entry("ep.context_file_path", context)?
                .with_config_entry("ep.context_embed_mode", "0")?;
            if job.models.len() > 1 {
                builder = builder.with_config_entry("ep.share_ep_contexts", "1")?;
                if last {
                    builder = builder.with_config_entry("ep.stop_share_ep_contexts", "1")?;
                }
            }
            builder.commit_from_file(model)
        };
        let session = make();
        sessions.push(session.map_err(|error| OrtError::Session {
            model: model.display().to_string(),
            action: "compile the model",
            message: log.explain(error.message()),
        })?);
        log.release();
    }
    Ok(())
}

fn run(job: &RunJob, answers: &mut impl Write) -> Result<(), OrtError> {
    let mut model = match open(job) {
        Ok(model) => model,
        Err(error) => return Ok(write_frame(answers, Err(&error.to_string()))?),
    };
    let ports = Ports { inputs: model.inputs().to_vec(), outputs: model.outputs().to_vec() };
    let places = match Place::of(&ports.inputs) {
        Ok(places) => places,
        Err(problem) => return Ok(write_frame(answers, Err(&problem))?),
    };
    write_frame(answers, Ok(&serde_json::to_vec(&ports).map_err(io::Error::other)?))?;
    let mut requests = io::stdin().lock();
    // The parent closes its end when it is done.
    while let Some(bytes) = read_frame(&mut requests)? {
        let answer = bytes.and_then(|bytes| {
            let views = views(&places, &bytes)?;
            model.run(&views).map_err(|error| error.to_string())
        });
        match answer {
            Ok(outputs) => {
                let mut bytes = Vec::new();
                outputs.iter().for_each(|tensor| bytes.extend_from_slice(tensor.bytes()));
                write_frame(answers, Ok(&bytes))?;
            }
            Err(message) => write_frame(answers, Err(&message))?,
        }
    }
    Ok(())
}

fn open(job: &RunJob) -> Result<OrtModel, OrtError> {
    let library = libraries(&job.libraries)?;
    let backend = job.libraries.backend.to_string_lossy();
    let log = SessionLog::default();
    let options = [("backend_path", &*backend), ("htp_performance_mode", job.performance.option())];
    let session = builder(library, &log, &options, false)
        .and_then(|mut builder| builder.commit_from_file(&job.context));
    OrtModel::opened(job.context.display().to_string(), session, log, Vec::new())
}

/// A port whose size is known.
#[derive(Debug)]
pub(crate) struct Place {
    name: String,
    dtype: DType,
    pub(crate) shape: Vec<usize>,
    length: usize,
}

impl Place {
    /// The places of the tensors of `ports`, which follow each other in a frame.
    ///
    /// # Errors
    /// The name of a port without a fixed size.
    pub(crate) fn of(ports: &[Port]) -> Result<Vec<Self>, String> {
        let place = |port: &Port| {
            let shape = port.shape.iter().copied().collect::<Option<Vec<usize>>>()?;
            let length = port.dtype.byte_count(&shape)?;
            Some(Self { name: port.name.clone(), dtype: port.dtype, shape, length })
        };
        ports
            .iter()
            .map(|port| place(port).ok_or_else(|| format!("{} has no fixed size", port.name)))
            .collect()
    }
}

/// The tensors of all places, one after the other in `bytes`.
///
/// # Errors
/// When the bytes are not exactly those of the tensors.
pub(crate) fn views<'a>(
    places: &'a [Place],
    bytes: &'a [u8],
) -> Result<Vec<(&'a str, TensorView<'a>)>, String> {
    let mut rest = bytes;
    let mut views = Vec::with_capacity(places.len());
    for place in places {
        let (tensor, after) = rest
            .split_at_checked(place.length)
            .ok_or_else(|| format!("{} of {} bytes is cut off", place.name, place.length))?;
        let view = TensorView::new(place.dtype, &place.shape, tensor);
        views.push((place.name.as_str(), view.map_err(|error| error.to_string())?));
        rest = after;
    }
    if rest.is_empty() { Ok(views) } else { Err(format!("{} bytes too many", rest.len())) }
}

/// Longest frame that is read: all tensors of a step, or a message.
const FRAME_LIMIT: u64 = 1 << 36;

/// Writes a result: a byte that tells success from failure, the length, the content.
pub(crate) fn write_frame(out: &mut impl Write, result: Result<&[u8], &str>) -> io::Result<()> {
    let (kind, bytes) = match result {
        Ok(bytes) => (0u8, bytes),
        Err(message) => (1, message.as_bytes()),
    };
    out.write_all(&[kind])?;
    out.write_all(&(bytes.len() as u64).to_le_bytes())?;
    out.write_all(bytes)?;
    out.flush()
}

/// Reads what [`write_frame`] wrote; `None` at the end of the stream.
pub(crate) fn read_frame(from: &mut impl Read) -> io::Result<Option<Result<Vec<u8>, String>>> {
    let mut kind = [0];
    if from.read(&mut kind)? == 0 {
        return Ok(None);
    }
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > FRAME_LIMIT {
        return Err(io::Error::other(format!("a frame of {length} bytes")));
    }
    // The length is believed as far as bytes come.
    let mut bytes = Vec::new();
    if from.take(length).read_to_end(&mut bytes)? as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(match kind {
        [0] => Ok(bytes),
        _ => Err(String::from_utf8_lossy(&bytes).into_owned()),
    }))
}

/// The answer in a worker's folder.
pub(crate) fn read_reply(folder: &Path) -> Result<Reply, String> {
    let text = fs::read(folder.join(REPLY)).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}
