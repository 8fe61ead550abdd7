//! Models as they are written and read back.

#![allow(clippy::unwrap_used, reason = "helpers of tests stop at the first surprise")]

mod common;
mod plan;
mod round_trip;
