use super::memory::MemoryWatch;
use crate::commands::export::threads;
use crate::commands::synth::{WeightType, find_preset};
use crate::printer::{Printer, mebibytes};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_artifact::{ExportRequest, export};
use firesteel_checkpoint::{Checkpoint, RandomWeights, SyntheticOptions, presets, write_synthetic};
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision};
use firesteel_step::{CacheLayoutChoice, Logits};
use fs_err as fs;
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Export against a plain writer of the same bytes, and the memory it takes.
///
/// Both write to the disk that holds --dir and wait until the bytes are there. The plain writer
/// copies one buffer from memory, sequentially. Which of the two goes first alternates, and the
/// ratio is the geometric mean of both orders' medians. Before each the system stores what others
/// have written, and the disk rests (--rest), so that none pays for another's bytes. A first pair
/// that is not counted warms up.
#[derive(Debug, Args)]
pub(super) struct BenchExport {
    /// Checkpoint to export [default: one that is made, see --preset]
    checkpoint: Option<PathBuf>,
    /// Shape of the checkpoint that is made
    #[arg(long, default_value = presets().into_iter().next())]
    preset: String,
    /// Element type of the checkpoint that is made
    #[arg(long, value_enum, default_value_t = WeightType::Bf16)]
    dtype: WeightType,
    /// Export in 32 bits instead of 16
    #[arg(long)]
    fp32: bool,
    /// Pairs of runs; an even number
    #[arg(long, default_value_t = 6)]
    runs: usize,
    /// Seconds that the disk rests before each run: space that was freed goes back to it after
    /// some, and a writer that takes it again before that is much faster or slower
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    rest: u64,
    /// Folder for what is written; it is removed again
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    bytes: u64,
    runs: Vec<Run>,
    /// Export time over the plain writer's: geometric mean of the two orders' medians.
    ratio: f64,
    /// The same for the pairs in which the plain writer came first, and the export.
    ratio_plain_first: f64,
    ratio_export_first: f64,
    /// Largest anonymous resident memory of the process while exporting.
    peak_rss_anon_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Run {
    plain_seconds: f64,
    export_seconds: f64,
    ratio: f64,
}

/// What the plain writer hands to the system at once.
const BUFFER: usize = 8 << 20;

impl BenchExport {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        if self.runs == 0 || !self.runs.is_multiple_of(2) {
            bail!("--runs {}: an even number is needed, half for each order", self.runs);
        }
        let scratch = tempfile::Builder::new().prefix(".firesteel-bench-").tempdir_in(&self.dir)?;
        let folder = match &self.checkpoint {
            Some(folder) => folder.clone(),
            None => {
                printer.talk("making the checkpoint");
                let folder = scratch.path().join("checkpoint");
                let weights = RandomWeights { dtype: self.dtype.dtype(), seed: 0, outliers: false };
                let config = find_preset(&self.preset)?;
                write_synthetic(SyntheticOptions { config, weights }, &folder, &|_, _| {})?;
                folder
            }
        };
        let checkpoint = Checkpoint::open(&folder)?;
        let request = ExportRequest {
            checkpoint: &checkpoint,
            options: ExportOptions {
                tokens: 1,
                context: 1024,
                layers: 0..checkpoint.config().num_layers(),
                cache_layout: CacheLayoutChoice::Auto,
                logits: Logits::Last,
                gelu: Gelu::Exact,
                precision: if self.fp32 { Precision::Fp32 } else { Precision::Fp16 },
                dialect: Dialect::Portable,
                head_shards: 1,
            },
            embedding: false,
            random_seed: None,
            force: false,
            threads: threads(),
        };
        let mut report = Report {
            bytes: 0,
            runs: Vec::new(),
            ratio: 0.0,
            ratio_plain_first: 0.0,
            ratio_export_first: 0.0,
            peak_rss_anon_bytes: None,
        };
        let rest = Duration::from_secs(self.rest.min(600));
        let out = scratch.path().join("artifact");
        let plain = scratch.path().join("plain");
        // The first pair warms the checkpoint's pages and the system's memory and is not counted.
        for run in 0..=self.runs {
            let timed_export = |peak: &mut Option<u64>| -> anyhow::Result<(f64, u64)> {
                settle(&scratch, rest)?;
                let memory = MemoryWatch::start();
                let start = Instant::now();
                let artifact = export(&request, &out, &|_, _| {})?;
                let seconds = start.elapsed().as_secs_f64();
                *peak = (*peak).max(memory.stop());
                fs::remove_dir_all(&out)?;
                Ok((seconds, artifact.manifest().data.iter().map(|data| data.bytes).sum()))
            };
            // Neither side is always the one that finds the disk busy with the other's bytes.
            let (plain_seconds, export_seconds);
            if run % 2 == 0 {
                (export_seconds, report.bytes) = timed_export(&mut report.peak_rss_anon_bytes)?;
                settle(&scratch, rest)?;
                plain_seconds = plain_write(&plain, report.bytes)?;
            } else {
                settle(&scratch, rest)?;
                plain_seconds = plain_write(&plain, report.bytes)?;
                (export_seconds, report.bytes) = timed_export(&mut report.peak_rss_anon_bytes)?;
            }
            let ratio = export_seconds / plain_seconds;
            let label =
                if run == 0 { "warm-up".into() } else { format!("run {run} of {}", self.runs) };
            printer.talk(&format!("{label}: export / plain writer {ratio:.2}"));
            if run > 0 {
                report.runs.push(Run { plain_seconds, export_seconds, ratio });
            }
        }
        let of_order = |order: usize| {
            let runs = report.runs.iter().skip(order).step_by(2);
            super::median(&mut runs.map(|run| run.ratio).collect::<Vec<f64>>()).context("no run")
        };
        (report.ratio_plain_first, report.ratio_export_first) = (of_order(0)?, of_order(1)?);
        report.ratio = (report.ratio_plain_first * report.ratio_export_first).sqrt();
        if self.json {
            printer.json(&report)?;
        } else {
            printer.line(format!(
                "{} written; export / plain writer {:.2} ({} pairs; {:.2} with the plain writer \
                 first, {:.2} with the export first; the disk rested {} s before each)",
                mebibytes(report.bytes),
                report.ratio,
                report.runs.len(),
                report.ratio_plain_first,
                report.ratio_export_first,
                rest.as_secs(),
            ))?;
            let memory = report.peak_rss_anon_bytes;
            printer.line(format!(
                "peak anonymous memory of the export: {}",
                memory.map_or("not known on this system".into(), mebibytes)
            ))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Seconds that a sequential writer takes for `bytes` bytes until they are on the disk.
fn plain_write(path: &Path, bytes: u64) -> anyhow::Result<f64> {
    // Not zeros, which some file systems store without writing.
    let buffer: Vec<u8> =
        (0..BUFFER as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let start = Instant::now();
    let mut file = fs::File::create_new(path)?;
    let mut left = bytes;
    while left > 0 {
        let count = left.min(BUFFER as u64);
        file.write_all(&buffer[..count as usize])?;
        left -= count;
    }
    file.sync_all()?;
    let seconds = start.elapsed().as_secs_f64();
    drop(file);
    fs::remove_file(path)?;
    Ok(seconds)
}

/// Most bytes that others may still have to store when a run begins.
const IDLE: u64 = 64 << 20;
/// How long to wait for the disk at most: other programs may write all the time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until what was removed is free again and the system has stored what was written, and then
/// lets the disk rest.
fn settle(folder: &tempfile::TempDir, rest: Duration) -> anyhow::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    rustix::fs::syncfs(fs::File::open(folder.path())?.file())?;
    // Elsewhere there is a call for all file systems together.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    {
        let _ = folder;
        #[cfg(unix)]
        rustix::fs::sync();
    }
    let start = Instant::now();
    while unstored().is_some_and(|bytes| bytes > IDLE) && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(100));
    }
    std::thread::sleep(rest);
    Ok(())
}

/// Bytes that the system has yet to store, where it tells.
fn unstored() -> Option<u64> {
    let memory = fs::read_to_string("/proc/meminfo").ok()?;
    let kibibytes = |key: &str| -> Option<u64> {
        let line = memory.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix(" kB")?.trim().parse().ok()
    };
    kibibytes("Dirty:")?.checked_add(kibibytes("Writeback:")?)?.checked_mul(1024)
}
