//! Checkpoints as they are read and written: golden ones, variations and hostile files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail as tests do")]

mod allocation;
mod checkpoint;
mod common;
mod config;
mod gguf;
mod gguf_write;
mod lost_pages;
mod qwen3;
mod shards;
mod synthetic;
