//! Every kernel of this CPU against plain references.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod attention;
mod isa;
mod matmul;
mod matrix;
mod measure;
mod ops;
mod pool;
mod support;
