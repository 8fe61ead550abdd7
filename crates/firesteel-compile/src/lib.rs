//! An artifact compiled for the NPU of a phone, on a plain PC.
//!
//! [`compile`] cuts a step by layers into parts that share the contract ([`Split`]), has Qualcomm's
//! compiler make a context binary of every part in a child process, audits what it made of each,
//! and writes a folder that is complete or absent. Finished parts wait in the cache folder, under a
//! hash of all that they depend on, until every part is done. [`Compiled`] opens such a folder and
//! chains its parts on the emulator.
//!
//! The steps of one folder are those whose caches fit each other, such as one of a token and one of
//! 128. They can share their weights in one binary; the emulator cannot load that, so it is only
//! audited, and every step also has a binary of its own.

mod build;
mod chain;
mod manifest;
mod open;
mod part;

pub use build::{CompileOptions, CompileProgress, compile, step_names};
pub use manifest::{
    COMPILED_VERSION, CompiledManifest, FileEntry, Libraries, Measured, PartEntry, PartRole,
    SharedEntry, StepEntry, Target,
};
pub use open::Compiled;
pub use part::{PART_BYTES, Split};

use firesteel_artifact::ArtifactError;
use firesteel_check::audit::{AuditError, Finding, Rule};
use firesteel_checkpoint::CheckpointError;
use firesteel_graph::GraphError;
use firesteel_onnx::OnnxError;
use firesteel_ort::OrtError;
use firesteel_step::{RunnerError, StepError};
use std::path::PathBuf;

/// Why something could not be compiled, or what was compiled could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// A file could not be read or written; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// An artifact cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// A file cannot be mapped.
    #[error(transparent)]
    Map(#[from] CheckpointError),
    /// A graph cannot be cut.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A model file cannot be written or read.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// The runtime or the compiler failed.
    #[error(transparent)]
    Ort(#[from] OrtError),
    /// What the compiler wrote could not be read.
    #[error("{part}: {source}")]
    Audit {
        /// Name of the part.
        part: String,
        /// What is wrong.
        source: AuditError,
    },
    /// The contract of a part is impossible.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A runner cannot be made.
    #[error(transparent)]
    Runner(#[from] RunnerError),
    /// The options do not fit each other or the artifacts.
    #[error("{option}: {problem}")]
    Option {
        /// The option, as on the command line.
        option: &'static str,
        /// Why it cannot be used, and what can.
        problem: String,
    },
    /// The compiler did something else than the graph says.
    #[error("{part}: the audit found {} things that were not meant:\n{}", findings.len(), listed(findings))]
    Findings {
        /// Name of the part.
        part: String,
        /// What it found.
        findings: Vec<Finding>,
    },
    /// A graph or what was made of it is too large.
    #[error("{part}: {what} has {bytes} bytes, and at most {limit} are possible; {way}")]
    Size {
        /// Name of the part.
        part: String,
        /// What is too large.
        what: &'static str,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
        /// The way out.
        way: &'static str,
    },
    /// The manifest is not understood.
    #[error("{}: {problem}", file.display())]
    Manifest {
        /// The manifest.
        file: PathBuf,
        /// What is wrong, and what is accepted.
        problem: String,
    },
    /// A file of the folder is not what the manifest says.
    #[error("{}: {problem}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// What differs.
        problem: String,
    },
}

/// Findings that an error repeats.
const LISTED: usize = 12;

fn listed(findings: &[Finding]) -> String {
    let mut lines: Vec<String> =
        findings.iter().take(LISTED).map(|finding| format!("  {finding}")).collect();
    if findings.len() > LISTED {
        lines.push(format!("  and {} more", findings.len() - LISTED));
    }
    if findings.iter().any(|finding| finding.rule != Rule::Cpu) {
        lines.push("(--allow RULE lets a rule pass, and the manifest says so)".into());
    }
    lines.join("\n")
}
