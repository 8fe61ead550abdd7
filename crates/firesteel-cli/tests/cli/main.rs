//! The whole program: golden vectors through every runner, and the command line.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed helper is a failed test")]

mod artifact;
mod bench;
mod commands;
mod compile;
mod fidelity;
mod generate;
mod gguf;
mod golden;
mod house;
mod made;
mod parity;
mod phone_kit;
mod profile;
mod profile_kit;
mod profile_report;
mod quantized;
mod qwen3;
mod support;
