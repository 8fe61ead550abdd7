//! Tables, compositions, estimates and reports of other tools.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper is a failed test")]

mod estimate;
mod import;
mod profile;
