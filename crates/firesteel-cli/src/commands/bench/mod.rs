//! Measurements; one file each.

mod decode;
mod export;
mod kernels;
mod memory;
mod qnn;
mod sampler;

use crate::printer::Printer;
use anyhow::bail;
use clap::{Args, Subcommand};
use std::process::ExitCode;

/// Measure this program on this machine.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Export against a plain writer of the same bytes, and the memory it takes.
    Export(export::BenchExport),
    /// Every kernel against scalar and against the read bandwidth.
    Kernels(kernels::BenchKernels),
    /// Prompt and decoding speed of a checkpoint, against the read bandwidth.
    Decode(decode::BenchDecode),
    /// What the compiler for a phone's NPU plans for layers spelled in different ways.
    Qnn(qnn::BenchQnn),
    /// Picking a token against the time of a step.
    Sampler(sampler::BenchSampler),
}

impl Bench {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        match self.what {
            What::Export(bench) => bench.run(printer),
            What::Kernels(bench) => bench.run(printer),
            What::Decode(bench) => bench.run(printer),
            What::Qnn(bench) => bench.run(printer),
            What::Sampler(bench) => bench.run(printer),
        }
    }
}

/// Threads to measure with: what `--threads` says, or one for each core.
fn threads(given: Option<usize>) -> anyhow::Result<usize> {
    match given {
        Some(0) => bail!("--threads 0: 1 or more is accepted"),
        Some(threads) => Ok(threads),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

/// Bytes that are read to measure the bandwidth: far more than any cache holds.
const BANDWIDTH_BYTES: usize = 1 << 30;

/// The middle of an odd number of values, or the upper middle; `None` of none.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
