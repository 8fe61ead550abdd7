use super::child::{Limits, Usage, Worker, WorkerCommand};
use super::find_qnn;
use super::soc::Soc;
use super::worker::{CompileJob, Job, Libraries, Reply, read_reply};
use crate::{OrtError, find_library};
use fs_err as fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A model to compile.
#[derive(Debug, Clone)]
pub struct ContextModel {
    /// The ONNX file, with its data beside it.
    pub model: PathBuf,
    /// Bare name of the context file that is written; its binary's name begins in the same way.
    pub context: String,
}

/// Whether every node must run on the HTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuNodes {
    /// A node that the HTP does not take is an error.
    Refused,
    /// Such nodes stay on the CPU, so that the account of the graph shows which they are.
    Kept,
}

/// What to compile, for whom, and within which limits.
#[derive(Debug, Clone)]
pub struct CompileRequest<'a> {
    /// The models. Several share their weights in one binary.
    pub models: &'a [ContextModel],
    /// The chip.
    pub soc: Soc,
    /// Whether the compiler writes its account of each graph beside the context.
    pub account: bool,
    /// What happens to nodes that the HTP does not take.
    pub cpu_nodes: CpuNodes,
    /// ONNX Runtime, or a folder that holds it; looked up as [`load`](crate::load) says by default.
    pub library: Option<PathBuf>,
    /// The program that does the work.
    pub worker: &'a WorkerCommand,
    /// What it may use.
    pub limits: Limits,
}

/// What a compilation has written and used.
#[derive(Debug, Clone)]
pub struct CompileOutcome {
    /// Bare names of the binaries.
    pub binaries: Vec<String>,
    /// Bare names of the graphs that the compiler was given, as JSON; one for each part of a model
    /// that is on the HTP. Empty without the account.
    pub graphs: Vec<String>,
    /// Bare names of the compiler's schematics. Empty without the account.
    pub schematics: Vec<String>,
    /// Largest resident memory, in bytes.
    pub peak_memory: u64,
    /// Time that it took on this machine.
    pub time: Duration,
    /// The end of what the libraries wrote.
    pub log: String,
}

/// Compiles models in a child process whose working directory is `folder`, where the context files
/// and binaries appear. `heartbeat` hears the time and the memory used.
///
/// # Errors
/// When a library is missing, the compiler refuses a model, or the child dies or is beyond a limit;
/// the error has the last lines of its log and what is known about them.
pub fn compile_contexts(
    request: &CompileRequest<'_>,
    folder: &Path,
    heartbeat: &mut dyn FnMut(Duration, u64),
) -> Result<CompileOutcome, OrtError> {
    let runtime = find_library(request.library.as_deref())?;
    let libraries = Libraries::new(runtime, &find_qnn()?);
    let mut models = Vec::with_capacity(request.models.len());
    for ContextModel { model, context } in request.models {
        if Path::new(context).file_name().is_none_or(|plain| plain != context.as_str()) {
            let reason = format!("{context:?} is not a bare file name");
            return Err(OrtError::Model { model: model.display().to_string(), reason });
        }
        models.push((fs::canonicalize(model)?, context.clone()));
    }
    let job = Job::Compile(CompileJob {
        libraries,
        models,
        soc: request.soc.number,
        arch: request.soc.arch,
        account: request.account,
        cpu_nodes: request.cpu_nodes == CpuNodes::Kept,
    });
    let mut worker = Worker::start(request.worker, &job, folder, false, request.limits)?;
    let usage = worker.finish(&mut |Usage { time, peak_memory }| heartbeat(time, peak_memory))?;
    match read_reply(folder) {
        Ok(Reply::Done) => {}
        Ok(Reply::Failed(message)) => return Err(worker.failure(format!("failed: {message}"))),
        Err(problem) => return Err(worker.failure(format!("gave no answer: {problem}"))),
    }
    let names = names(folder)?;
    let ending = |suffix: &str| -> Vec<String> {
        names.iter().filter(|name| name.ends_with(suffix)).cloned().collect()
    };
    let graphs = ending(".json")
        .into_iter()
        .filter(|name| name.starts_with(GRAPH) && !name.ends_with("_tensor_log.json"));
    Ok(CompileOutcome {
        binaries: ending("_qnn.bin"),
        graphs: graphs.collect(),
        schematics: ending("_schematic.bin"),
        peak_memory: usage.peak_memory,
        time: usage.time,
        log: worker.log(),
    })
}

/// Beginning of the names that the provider gives to graphs.
const GRAPH: &str = "QNN_";

/// Names of the entries of a folder, sorted.
fn names(folder: &Path) -> Result<Vec<String>, OrtError> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}
