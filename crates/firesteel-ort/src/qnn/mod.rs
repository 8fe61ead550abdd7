//! Qualcomm's compiler and its emulator of the Hexagon tensor processor (HTP), through ONNX
//! Runtime's QNN plugin.
//!
//! The libraries hold gigabytes, print to standard output, write into the working directory and
//! may end the process, so nothing here calls them in the caller's process: [`compile_contexts`]
//! and [`HtpModel`] start the caller's own program again with a [`WorkerCommand`], and what that
//! does is [`serve`].

mod child;
mod compile;
mod diagnosis;
mod library;
mod runner;
mod soc;
mod worker;

pub use child::{Limits, WorkerCommand};
pub use compile::{CompileOutcome, CompileRequest, ContextModel, CpuNodes, compile_contexts};
pub use diagnosis::{Diagnosis, diagnose};
pub use library::{QnnLibrary, find_qnn};
pub use runner::{HtpModel, HtpOptions};
pub use soc::{Performance, SOCS, Soc};
pub use worker::{compile_settings, serve};
