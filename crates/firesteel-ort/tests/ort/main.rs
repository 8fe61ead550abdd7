//! The runtime in real sessions, and how it is installed.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper is a failed test")]

mod models;
mod setup;
