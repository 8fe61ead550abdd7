//! ONNX Runtime behind the [`Runner`](firesteel_step::Runner) trait.
//!
//! The library is not linked: it is found and opened once a process ([`load`]), and [`setup_ort`]
//! fetches a pinned build of it. [`OrtModel`] runs any graph of tensors by name; [`OrtRunner`] is
//! an [`OrtModel`] that was checked against a step contract.
//!
//! Every session names the CPU device itself. A session that names none is placed by a selection
//! policy, which picks another device as soon as a plugin is registered. Sessions for checking
//! switch graph optimizations off and say so ([`Optimization::Disabled`]). On a CPU the runtime
//! computes f16 graphs in f32 between casts, so it cannot show that half precision overflows; the
//! graph evaluator does.
//!
//! [`qnn`] has Qualcomm's compiler and its emulator, which are only ever loaded in a child process:
//! the caller's program started again, whose hidden verb is [`qnn::serve`]. The child takes its job
//! from a file in its working directory and is ended beyond its limits of memory and time, and what
//! it prints is captured and explained.

mod error;
mod library;
mod log;
pub mod qnn;
mod runner;
mod session;
mod setup;
mod tensor;

pub use error::OrtError;
pub use library::{OrtLibrary, find_library, library_version, load};
pub use runner::OrtRunner;
pub use session::{Optimization, OrtModel, OrtOptions, Port};
pub use setup::{
    ONNX_RUNTIME_VERSION, QNN_SDK_VERSION, QNN_VERSION, SetupOptions, setup_ort, setup_qnn,
};
