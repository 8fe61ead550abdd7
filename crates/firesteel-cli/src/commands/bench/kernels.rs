use super::{BANDWIDTH_BYTES, threads};
use crate::printer::{Printer, table};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_kernels::measure::{
    KernelMeasurement, OperandSize, Operation, Shape, kernels, read_bandwidth, time, time_operation,
};
use firesteel_kernels::{AttentionShape, Isa, Pool};
use serde::Serialize;
use std::process::ExitCode;

/// Every kernel against scalar and against the read bandwidth.
#[derive(Debug, Args)]
pub(super) struct BenchKernels {
    /// Activation rows, columns and weight rows
    #[arg(long, value_name = "M,K,N", value_delimiter = ',', default_values_t = [1, 2048, 6656])]
    shape: Vec<usize>,
    /// Query heads, key/value heads and elements of a head, for attention of M queries
    #[arg(long, value_name = "H,KV,D", value_delimiter = ',', default_values_t = [8, 2, 256])]
    heads: Vec<usize>,
    /// Cached entries that attention goes over
    #[arg(long, value_name = "N", default_value_t = 4096)]
    entries: usize,
    /// Threads [default: the cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Runs timed of each kernel; the best counts
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
    /// Of the weights of a product; for anything else, its name.
    format: String,
    isa: String,
    seconds: f64,
    /// Time of the scalar kernel over that of this one.
    against_scalar: f64,
    /// Bytes touched a second over the read bandwidth.
    of_bandwidth: f64,
    /// Of products and attention.
    gflops: Option<f64>,
    /// Largest difference from scalar, over the largest magnitude.
    difference: f32,
}

/// Weights that are timed in turn take at least this much, so that no cache serves them.
const COLD_BYTES: usize = 256 << 20;

/// Largest dimension, and most bytes of a weight.
const DIMENSION_LIMIT: usize = 1 << 20;

/// Most heads, and elements of a head.
const HEAD_LIMIT: usize = 1 << 12;

impl BenchKernels {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let [m, k, n] = match self.shape[..] {
            [m, k, n] if [m, k, n].iter().all(|d| (1..=DIMENSION_LIMIT).contains(d)) => [m, k, n],
            _ => bail!("--shape takes M,K,N, each from 1 to {DIMENSION_LIMIT}"),
        };
        if k.saturating_mul(n) > 1 << 30 || m.saturating_mul(k.max(n)) > 1 << 30 {
            bail!("--shape {m},{k},{n}: matrices of up to 2^30 elements are measured");
        }
        let [heads, kv_heads, head_dim] = match self.heads[..] {
            [h, kv, d] if [h, kv, d].iter().all(|n| (1..=HEAD_LIMIT).contains(n)) => [h, kv, d],
            _ => bail!("--heads takes H,KV,D, each from 1 to {HEAD_LIMIT}"),
        };
        let attention = AttentionShape { heads, kv_heads, head_dim, queries: m };
        attention.check().context("--heads")?;
        let cached = self.entries.saturating_mul(kv_heads * head_dim);
        if cached > 1 << 28 || m.saturating_mul(heads * head_dim) > 1 << 28 {
            bail!("--entries {}: caches of up to 2^28 elements are measured", self.entries);
        }
        let pool = Pool::new(threads(self.threads)?)?;
        let bandwidth = read_bandwidth(&pool, BANDWIDTH_BYTES)?;
        let mut report = Report {
            shape: [m, k, n],
            threads: pool.threads(),
            read_bandwidth_bytes_per_second: bandwidth,
            kernels: Vec::new(),
        };
        let mut add =
            |format: String, isa: Isa, flops: Option<usize>, measured: KernelMeasurement| {
                let scalar = report
                    .kernels
                    .iter()
                    .rfind(|kernel| kernel.format == format && kernel.isa == "scalar");
                let scalar = scalar.map_or(measured.seconds, |kernel| kernel.seconds);
                report.kernels.push(Kernel {
                    format,
                    isa: isa.name().into(),
                    seconds: measured.seconds,
                    against_scalar: scalar / measured.seconds,
                    of_bandwidth: measured.bytes as f64 / measured.seconds / bandwidth,
                    gflops: flops.map(|flops| flops as f64 / measured.seconds / 1e9),
                    difference: measured.difference,
                });
            };
        let copies = |bytes: usize| COLD_BYTES.div_ceil(bytes.max(1)).clamp(1, self.repeats.max(1));
        for entry in kernels() {
            if k % entry.format.block_columns() != 0 {
                printer.warn(&format!(
                    "{} needs a multiple of {} columns and is left out",
                    entry.format,
                    entry.format.block_columns()
                ));
                continue;
            }
            let copies = copies(entry.format.packed_bytes(n, k)?);
            let measured = time(&pool, entry, Shape { m, k, n }, self.repeats, copies)?;
            add(entry.format.to_string(), entry.isa, Some(2 * m * k * n), measured);
        }
        for operation in Operation::ALL {
            let size = OperandSize { attention, entries: self.entries, rows: m, columns: k };
            let attends = operation.is_attention();
            let copies = if attends { copies(8 * self.entries * kv_heads * head_dim) } else { 1 };
            let (what, count) =
                if attends { ("elements of a head", head_dim) } else { ("columns", k) };
            let block = operation.block_columns();
            if !count.is_multiple_of(block) {
                printer.warn(&format!(
                    "{operation} needs a multiple of {block} {what} and is left out"
                ));
                continue;
            }
            // Each query sees one entry more than the one before it.
            let seen: usize = (0..m).map(|query| self.entries.saturating_sub(query)).sum();
            let flops = attends.then_some(4 * seen * heads * head_dim);
            for isa in operation.isas() {
                let measured = time_operation(&pool, (operation, isa), size, self.repeats, copies)?;
                add(operation.to_string(), isa, flops, measured);
            }
        }
        if self.json {
            printer.json(&report)?;
            return Ok(ExitCode::SUCCESS);
        }
        printer.line(format!(
            "M {m}, K {k}, N {n}, {} threads; times are of this run on this machine",
            report.threads
        ))?;
        let titles =
            ["kernel", "isa", "against scalar", "of read bandwidth", "GFLOPS", "difference"];
        let mut rows = vec![titles.map(str::to_owned).to_vec()];
        for kernel in &report.kernels {
            rows.push(vec![
                kernel.format.clone(),
                kernel.isa.clone(),
                format!("{:.2}", kernel.against_scalar),
                format!("{:.2}", kernel.of_bandwidth),
                kernel.gflops.map_or(String::new(), |gflops| format!("{gflops:.1}")),
                format!("{:.1e}", kernel.difference),
            ]);
        }
        for line in table(&rows) {
            printer.line(line)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
