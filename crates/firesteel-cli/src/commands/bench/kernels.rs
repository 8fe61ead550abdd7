use super::{BANDWIDTH_BYTES, cores};
use crate::printer::{Printer, table};
use anyhow::bail;
use clap::Args;
use firesteel_kernels::Pool;
use firesteel_kernels::measure::{Shape, kernels, read_bandwidth, time};
use serde::Serialize;
use std::process::ExitCode;

/// Every kernel against scalar and against the read bandwidth.
#[derive(Debug, Args)]
pub(super) struct BenchKernels {
    /// Activation rows, columns and weight rows
    #[arg(long, value_name = "M,K,N", value_delimiter = ',', default_values_t = [1, 2048, 6656])]
    shape: Vec<usize>,
    /// Threads [default: the cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Products timed of each kernel; the best counts
    #[arg(long, default_value_t = 20)]
    repeats: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    shape: [usize; 3],
    threads: usize,
    read_bandwidth_bytes_per_second: f64,
    kernels: Vec<Kernel>,
}

#[derive(Debug, Serialize)]
struct Kernel {
    format: String,
    isa: String,
    seconds: f64,
    /// Time of the scalar kernel over that of this one.
    against_scalar: f64,
    /// Bytes touched a second over the read bandwidth.
    of_bandwidth: f64,
    gflops: f64,
    /// Largest difference from scalar, over the largest magnitude.
    difference: f32,
}

/// Weights that are timed in turn take at least this much, so that no cache serves them.
const COLD_BYTES: usize = 256 << 20;

/// Largest dimension, and most bytes of a weight.
const DIMENSION_LIMIT: usize = 1 << 20;

impl BenchKernels {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let [m, k, n] = match self.shape[..] {
            [m, k, n] if [m, k, n].iter().all(|d| (1..=DIMENSION_LIMIT).contains(d)) => [m, k, n],
            _ => bail!("--shape takes M,K,N, each from 1 to {DIMENSION_LIMIT}"),
        };
        if k.saturating_mul(n) > 1 << 30 || m.saturating_mul(k.max(n)) > 1 << 30 {
            bail!("--shape {m},{k},{n}: matrices of up to 2^30 elements are measured");
        }
        let pool = Pool::new(self.threads.unwrap_or_else(cores))?;
        let bandwidth = read_bandwidth(&pool, BANDWIDTH_BYTES)?;
        let mut report = Report {
            shape: [m, k, n],
            threads: pool.threads(),
            read_bandwidth_bytes_per_second: bandwidth,
            kernels: Vec::new(),
        };
        let mut scalar = 0.0;
        for entry in kernels() {
            if k % entry.format.block_columns() != 0 {
                printer.warn(&format!(
                    "{} needs a multiple of {} columns and is left out",
                    entry.format,
                    entry.format.block_columns()
                ));
                continue;
            }
            let bytes = entry.format.packed_bytes(n, k)?;
            let copies = COLD_BYTES.div_ceil(bytes).clamp(1, self.repeats.max(1));
            let measured = time(&pool, entry, Shape { m, k, n }, self.repeats, copies)?;
            if entry.isa.name() == "scalar" {
                scalar = measured.seconds;
            }
            report.kernels.push(Kernel {
                format: entry.format.to_string(),
                isa: entry.isa.name().into(),
                seconds: measured.seconds,
                against_scalar: scalar / measured.seconds,
                of_bandwidth: measured.bytes as f64 / measured.seconds / bandwidth,
                gflops: 2.0 * (m * k * n) as f64 / measured.seconds / 1e9,
                difference: measured.difference,
            });
        }
        if self.json {
            printer.json(&report)?;
            return Ok(ExitCode::SUCCESS);
        }
        printer.line(format!(
            "M {m}, K {k}, N {n}, {} threads; times are of this run on this machine",
            report.threads
        ))?;
        let titles = ["format", "isa", "against scalar", "of read bandwidth", "difference"];
        let mut rows = vec![titles.map(str::to_owned).to_vec()];
        for kernel in &report.kernels {
            rows.push(vec![
                kernel.format.clone(),
                kernel.isa.clone(),
                format!("{:.2}", kernel.against_scalar),
                format!("{:.2}", kernel.of_bandwidth),
                format!("{:.1e}", kernel.difference),
            ]);
        }
        for line in table(&rows) {
            printer.line(line)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
