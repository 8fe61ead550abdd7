use firesteel_graph::GraphError;
use std::fmt;
use std::path::PathBuf;

/// What can go wrong with writing or reading a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// A file could not be created, written or read; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A part of a model, read or about to be written, is not supported or not valid.
    #[error("{}: {subject}: {problem}", file.display())]
    Model {
        /// The model file.
        file: PathBuf,
        /// The node, initializer, value or other part.
        subject: String,
        /// What is wrong, and what is accepted.
        problem: String,
    },
    /// The graph in a model is not valid.
    #[error("{}: {source}", file.display())]
    Graph {
        /// The model file.
        file: PathBuf,
        /// The violation.
        source: Box<GraphError>,
    },
    /// A file of a write plan cannot be named or filled as asked.
    #[error("output file {file:?}: {problem}")]
    Plan {
        /// Name of the file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// The data of a constant could not be made.
    #[error("constant {constant} for {}: {problem}", file.display())]
    Data {
        /// Name of the constant.
        constant: String,
        /// The file it was to be written to.
        file: PathBuf,
        /// What happened.
        problem: String,
    },
    /// A model without its external data is larger than a protobuf may be.
    #[error(
        "{}: {bytes} bytes of protobuf, the limit is {limit}; large constants belong in external \
         data files",
        file.display()
    )]
    TooLarge {
        /// The model file.
        file: PathBuf,
        /// Its size.
        bytes: u64,
        /// The largest accepted size.
        limit: u64,
    },
}

/// What is wrong with a part of a model whose file the caller knows.
#[derive(Debug)]
pub(crate) enum Fault {
    Part { subject: String, problem: String },
    Graph(GraphError),
}

impl Fault {
    pub(crate) fn new(subject: impl fmt::Display, problem: impl fmt::Display) -> Self {
        Fault::Part { subject: subject.to_string(), problem: problem.to_string() }
    }

    /// The error with the file's name.
    pub(crate) fn in_file(self, file: impl Into<PathBuf>) -> OnnxError {
        let file = file.into();
        match self {
            Fault::Part { subject, problem } => OnnxError::Model { file, subject, problem },
            Fault::Graph(source) => OnnxError::Graph { file, source: Box::new(source) },
        }
    }
}

impl From<GraphError> for Fault {
    fn from(error: GraphError) -> Self {
        Fault::Graph(error)
    }
}
