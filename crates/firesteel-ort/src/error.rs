use crate::qnn::{Diagnosis, SOCS};
use std::path::PathBuf;

/// Why ONNX Runtime could not be installed, found, loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OrtError {
    /// No place has the library.
    #[error(
        "ONNX Runtime was not found: no path was given (--ort), FIRESTEEL_ORT is not set, and \
         {cache} does not hold it; run `firesteel setup ort` to install it there"
    )]
    NoLibrary {
        /// The folder that `firesteel setup ort` fills, or why there is none.
        cache: String,
    },
    /// The path that was given has no library.
    #[error(
        "{path} (from {origin}): {reason}; give a libonnxruntime.so file or a folder that holds \
         one, or leave it out and run `firesteel setup ort`"
    )]
    LibraryPath {
        /// Who gave the path: `--ort` or `FIRESTEEL_ORT`.
        origin: &'static str,
        /// The path.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file was found, but the system's loader refuses it.
    #[error("{path} cannot be loaded as ONNX Runtime: {reason}")]
    Load {
        /// The file.
        path: PathBuf,
        /// The loader's reason.
        reason: String,
    },
    /// The library is older than the interface that is used.
    #[error(
        "{path} is ONNX Runtime {version}, but {needed} or newer is needed; `firesteel setup ort` \
         installs one"
    )]
    TooOld {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: String,
        /// The oldest version accepted.
        needed: String,
    },
    /// A process holds one library for its whole life.
    #[error(
        "this process has loaded ONNX Runtime from {loaded} and cannot load another from {asked}"
    )]
    OtherLoaded {
        /// The library in use.
        loaded: PathBuf,
        /// The library asked for.
        asked: PathBuf,
    },
    /// The number of threads is out of range.
    #[error("threads is {threads}, but 1 to {limit} is accepted")]
    Threads {
        /// The number asked for.
        threads: usize,
        /// The largest number accepted.
        limit: usize,
    },
    /// A session could not be made or run.
    #[error("{model}: ONNX Runtime could not {action}: {message}")]
    Session {
        /// Path of the model, or the folder of its data.
        model: String,
        /// What was tried, such as `open the model`.
        action: &'static str,
        /// The runtime's message, with the log lines that it does not repeat.
        message: String,
    },
    /// The model cannot be handed to ONNX Runtime.
    #[error("{model}: {reason}")]
    Model {
        /// Path of the model, or the folder of its data.
        model: String,
        /// What is wrong.
        reason: String,
    },
    /// An input or output is not what was asked for: another name, element type or shape.
    #[error("{model}: {side} {name}: expected {expected}, found {actual}")]
    Port {
        /// Path of the model, or the folder of its data.
        model: String,
        /// `input` or `output`.
        side: &'static str,
        /// Its name.
        name: String,
        /// What is needed.
        expected: String,
        /// What there is.
        actual: String,
    },
    /// Installing failed.
    #[error("{package} was not installed: {reason}; {advice}{}", quoted(output))]
    Setup {
        /// What was to be installed.
        package: &'static str,
        /// What went wrong.
        reason: String,
        /// The way out.
        advice: &'static str,
        /// The last lines that the installer wrote to standard error.
        output: String,
    },
    /// The QNN plugin is not installed.
    #[error("{cache} does not hold the QNN plugin; run `firesteel setup qnn` to install it there")]
    NoQnn {
        /// The folder that `firesteel setup qnn` fills, or why there is none.
        cache: String,
    },
    /// No such chip.
    #[error("soc {name} is not known; accepted: {}", known_socs())]
    Soc {
        /// The name asked for.
        name: String,
    },
    /// A child process could not do its work: it failed, died, or was ended.
    #[error("{model}: {action} {reason}{}{}", advised(.diagnoses), logged(.log))]
    Child {
        /// The model it worked on.
        model: String,
        /// What it was to do, such as `compiling`.
        action: &'static str,
        /// What happened.
        reason: String,
        /// Likely causes and what to do, from the reason and the log.
        diagnoses: Vec<&'static Diagnosis>,
        /// The last lines that it and its libraries wrote.
        log: String,
    },
    /// A file operation failed; the message holds the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

fn quoted(output: &str) -> String {
    if output.is_empty() { String::new() } else { format!("\npip wrote:\n{output}") }
}

fn known_socs() -> String {
    SOCS.map(|soc| soc.to_string()).join(", ")
}

fn advised(diagnoses: &[&Diagnosis]) -> String {
    diagnoses.iter().map(|diagnosis| format!("\n{diagnosis}")).collect()
}

fn logged(log: &str) -> String {
    if log.is_empty() { String::new() } else { format!("\nits last lines:\n{log}") }
}
