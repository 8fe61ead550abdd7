//! The engine against vectors of the reference exporter and of a float64 whole-sequence forward.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper is a failed test")]

mod blocks;
mod calibrate;
mod contract;
mod cpu;
mod decoder;
mod families;
mod packed;
mod sequence;
mod steps;
mod support;
