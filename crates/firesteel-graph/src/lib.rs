//! Typed graphs with static shapes.
//!
//! A [`Graph`] is a list of nodes in execution order over values with known element type and shape.
//! Nodes carry their parameters as attributes ([`Op`]); file formats that want some of them as
//! tensors are the business of the crate that writes the format. Shapes are inferred when a node is
//! added, so a graph that exists is well typed; [`Graph::validate`] proves it again after a graph
//! was read from a file.
//!
//! A node can bear a [`Tag`], its layer and its part of the step. Whoever has to know what a node
//! is there for asks for that, because names are for people.
//!
//! The [`Evaluator`] executes a graph slowly and plainly. An f32 graph is computed in f64 without
//! rounding inside, so it is the function that the graph writes down; an f16 graph is rounded after
//! every node, so that range and precision show.

mod evaluate;
mod graph;
mod infer;
mod op;
mod tag;

pub use evaluate::Evaluator;
pub use graph::{Constant, ConstantSource, Graph, Node, Value, ValueId};
pub use op::{GeluForm, Op};
pub use tag::{Part, Tag};

use firesteel_tensor::{DType, TensorError};

/// What is wrong with a graph or its execution.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// A node's inputs do not fit its operator.
    #[error("node {node} ({op}): {problem}; inputs {inputs}")]
    Node {
        /// Name of the node.
        node: String,
        /// Its operator.
        op: &'static str,
        /// What is wrong.
        problem: String,
        /// Names, types and shapes of the inputs.
        inputs: String,
    },
    /// A name is used twice, or a value that does not exist is used.
    #[error("value {name}: {problem}")]
    Value {
        /// Name of the value.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// An input of a run is not what the graph declares.
    #[error("input {name}: expected {expected_dtype} {expected:?}, got {actual_dtype} {actual:?}")]
    Input {
        /// Name of the input.
        name: String,
        /// Declared type.
        expected_dtype: DType,
        /// Declared shape.
        expected: Vec<usize>,
        /// Type given.
        actual_dtype: DType,
        /// Shape given.
        actual: Vec<usize>,
    },
    /// Another number of inputs was given than the graph has.
    #[error("the graph has {expected} inputs, got {actual}")]
    InputCount {
        /// Inputs of the graph.
        expected: usize,
        /// Inputs given.
        actual: usize,
    },
    /// Constant data could not be produced.
    #[error("constant {name}: {problem}")]
    Constant {
        /// Name of the constant.
        name: String,
        /// What happened.
        problem: String,
    },
    /// Bad tensor arithmetic.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
