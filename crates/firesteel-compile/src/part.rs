use crate::{CompileError, PartRole};
use firesteel_artifact::{Artifact, GraphRole};
use firesteel_graph::Graph;
use firesteel_step::PortEncoding;
use std::path::PathBuf;

/// How a step is cut into parts of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Split {
    /// Only as far as the graphs must be cut to be possible at all.
    #[default]
    Auto,
    /// Into this many parts; 1 leaves the artifact's graphs as they are.
    Parts(usize),
}

/// A graph that becomes a context of its own.
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) role: PartRole,
    /// Encodings of the ports that are integers.
    pub(crate) ports: Vec<PortEncoding>,
    /// What is meant.
    pub(crate) graph: Graph,
    /// Its file, where it is a graph of the artifact.
    pub(crate) model: Option<PathBuf>,
    /// What its content depends on besides the artifact's files.
    pub(crate) identity: String,
}

/// The parts of an artifact's step, named after `step`.
pub(crate) fn parts(
    artifact: &Artifact,
    step: &str,
    _split: Split,
) -> Result<Vec<Part>, CompileError> {
    let mut parts = Vec::new();
    for entry in &artifact.manifest().graphs {
        let graph = artifact.read_graph(entry)?;
        let (name, role) = match &entry.role {
            GraphRole::Step => {
                let step_spec = artifact.manifest().step.clone();
                (step.to_owned(), PartRole::Layers { step: step_spec })
            }
            GraphRole::Head { rows } => {
                let number = parts.len() - 1;
                (format!("{step}-head-{number}"), PartRole::Head { rows: rows.clone() })
            }
        };
        parts.push(Part {
            name,
            role,
            ports: artifact.manifest().ports().to_vec(),
            graph,
            model: Some(artifact.graph_path(entry)),
            identity: entry.sha256.clone(),
        });
    }
    Ok(parts)
}
