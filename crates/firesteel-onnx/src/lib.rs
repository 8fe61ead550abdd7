//! Graphs to and from ONNX model files.
//!
//! A [`WritePlan`] places the constants of one or several graphs in data files, and
//! [`WritePlan::write`] streams them there and writes the models. [`read_model`] maps a model back
//! into the same [`firesteel_graph::Graph`]; [`model_with_outputs`] makes values inside a model
//! visible for a check. Nothing outside this crate knows the format.
//!
//! Equal plans give equal bytes. Equal constants (by their key) are stored once for all graphs of a
//! plan, each at a multiple of 4096 bytes so that it can be mapped, and the vocabulary projection
//! can lie in the raw file of the embedding table. A few threads convert and write half a megabyte
//! at a time while another has the disk store what was written, so memory does not depend on the
//! model. Reading is strict and bounded; what is not understood is refused by name.

mod data;
mod error;
#[cfg(test)]
mod hostile;
mod op;
mod outputs;
mod plan;
mod proto;
mod read;
mod wire;
mod write;

pub use error::OnnxError;
pub use outputs::model_with_outputs;
pub use plan::{ModelFile, RawFile, WritePlan, WriteReport, WrittenFile, WrittenModel};
pub use read::{OnnxModel, read_model};

/// Oldest operator set that is written and read.
pub const MIN_OPSET: i64 = 18;

/// Newest operator set that is written and read.
pub const MAX_OPSET: i64 = 23;

/// Constants of at most this many bytes are stored inside the model file.
pub const INLINE_LIMIT: u64 = 1 << 10;

/// Constants in a data file start at multiples of this many bytes.
pub const DATA_ALIGNMENT: u64 = 4096;

/// Largest size of a model file without its external data.
pub const MAX_MODEL_BYTES: u64 = 1 << 30;
