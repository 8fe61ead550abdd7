use crate::GenerateError;
use fs_err as fs;
use serde::Serialize;
use serde_json::{Map, Value};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Key of the time of a model's forward pass.
pub const MODEL_FORWARD_MS: &str = "model.forward_ms";
/// Key of the time in which the next token was picked.
pub const MODEL_SAMPLE_MS: &str = "model.sample_ms";

/// What one step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepRecord<'a> {
    /// Times in milliseconds by key, such as [`MODEL_FORWARD_MS`].
    pub times: &'a [(&'static str, f64)],
    /// Tokens of the step.
    pub tokens: usize,
    /// Of a step whose tokens after the first were proposed by prompt lookup, those that were
    /// sampled too.
    pub accepted: Option<usize>,
    /// Position of its first token.
    pub position: usize,
    /// Bytes of the key/value caches.
    pub cache_bytes: usize,
}

/// Writes a file with one line of JSON a step, and a last line with the summary.
///
/// A line is `{"model.forward_ms": 80.1, "model.sample_ms": 0.2, "tokens": 1, "position": 17,
/// "cache_bytes": 1048576}`; a time that a step does not have is left out. A step with proposed
/// tokens also has `"proposed"` and `"accepted"`, how many of its tokens were. The last line is
/// `{"summary": …}` with a [`StepSummary`].
///
/// A line is written whole and at once, so a process that is killed leaves whole lines. When the
/// disk refuses a line, what came of it is taken back, nothing more is recorded, and
/// [`StepStats::finish`] says what happened: statistics never end a generation. The times are
/// kept for the summary, 8 bytes each, so use one of these for a request, not for the life of a
/// server.
#[derive(Debug)]
pub struct StepStats {
    file: fs::File,
    /// Bytes of whole lines.
    length: u64,
    steps: u64,
    tokens: u64,
    times: Vec<(&'static str, Vec<f64>)>,
    failed: Option<std::io::Error>,
}

/// What the steps of one file come to.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepSummary {
    /// Steps recorded.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Milliseconds by key, in the order in which the keys first came up.
    #[serde(flatten, serialize_with = "as_map")]
    pub times: Vec<(&'static str, TimeSummary)>,
}

/// A kind of time, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TimeSummary {
    /// Steps that have it.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// The smallest time that half of the steps do not exceed.
    pub p50: f64,
    /// The smallest time that 90 % of the steps do not exceed.
    pub p90: f64,
    /// The smallest time that 99 % of the steps do not exceed.
    pub p99: f64,
    /// The largest time.
    pub max: f64,
}

impl TimeSummary {
    fn new(mut times: Vec<f64>) -> Self {
        times.sort_unstable_by(f64::total_cmp);
        let count = times.len();
        let percentile = |percent: usize| {
            let rank = count.saturating_mul(percent).div_ceil(100);
            times.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        Self {
            count,
            mean: times.iter().sum::<f64>() / count.max(1) as f64,
            p50: percentile(50),
            p90: percentile(90),
            p99: percentile(99),
            max: percentile(100),
        }
    }
}

fn as_map<S: serde::Serializer>(
    times: &[(&'static str, TimeSummary)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(times.iter().map(|(key, summary)| (key, summary)))
}

impl StepStats {
    /// Starts a new file in `directory`, which is made if it does not exist. Its name,
    /// `steps-PROCESS-NUMBER.jsonl`, is one that is not there yet.
    ///
    /// # Errors
    /// When the folder or the file cannot be made.
    pub fn create(directory: &Path) -> Result<Self, GenerateError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(directory)?;
        let process = std::process::id();
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = directory.join(format!("steps-{process}-{number}.jsonl"));
            match fs::OpenOptions::new().append(true).create_new(true).open(path) {
                Ok(file) => return Ok(Self::on(file)),
                // A process of the same number was here before.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn on(file: fs::File) -> Self {
        Self { file, length: 0, steps: 0, tokens: 0, times: Vec::new(), failed: None }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Writes the line of a step.
    pub fn record(&mut self, step: &StepRecord<'_>) {
        if self.failed.is_some() {
            return;
        }
        let mut line = Map::new();
        for &(key, time) in step.times {
            line.insert(key.to_owned(), time.into());
        }
        line.insert("tokens".into(), step.tokens.into());
        if let Some(accepted) = step.accepted {
            line.insert("proposed".into(), step.tokens.saturating_sub(1).into());
            line.insert("accepted".into(), accepted.into());
        }
        line.insert("position".into(), step.position.into());
        line.insert("cache_bytes".into(), step.cache_bytes.into());
        if let Err(error) = self.write(&Value::Object(line)) {
            self.failed = Some(error);
            return;
        }
        self.steps = self.steps.saturating_add(1);
        self.tokens = self.tokens.saturating_add(step.tokens as u64);
        for &(key, time) in step.times {
            match self.times.iter_mut().find(|(other, _)| *other == key) {
                Some((_, times)) => times.push(time),
                None => self.times.push((key, vec![time])),
            }
        }
    }

    /// Writes the summary and returns it with the file.
    ///
    /// # Errors
    /// When the disk refused a line; the lines before it are in the file.
    pub fn finish(mut self) -> Result<(PathBuf, StepSummary), GenerateError> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        let times = std::mem::take(&mut self.times);
        let times = times.into_iter().map(|(key, times)| (key, TimeSummary::new(times)));
        let summary =
            StepSummary { steps: self.steps, tokens: self.tokens, times: times.collect() };
        self.write(&serde_json::json!({ "summary": summary }))?;
        Ok((self.path().to_owned(), summary))
    }

    fn write(&mut self, line: &Value) -> std::io::Result<()> {
        let line = format!("{line}\n");
        match self.file.write_all(line.as_bytes()) {
            Ok(()) => {
                self.length = self.length.saturating_add(line.len() as u64);
                Ok(())
            }
            Err(error) => {
                // The first error is the one to tell; if this fails too, a part of a line stays.
                let _ = self.file.set_len(self.length);
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record<'a>(times: &'a [(&'static str, f64)]) -> StepRecord<'a> {
        StepRecord { times, tokens: 2, accepted: None, position: 7, cache_bytes: 64 }
    }

    #[test]
    fn lines_and_the_summary_are_written() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("made/here");
        let mut stats = StepStats::create(&directory).unwrap();
        let other = StepStats::create(&directory).unwrap();
        assert_ne!(stats.path(), other.path());
        stats.record(&record(&[(MODEL_FORWARD_MS, 1.5)]));
        let times = [(MODEL_FORWARD_MS, 2.5), (MODEL_SAMPLE_MS, 0.25)];
        stats.record(&StepRecord { accepted: Some(0), ..record(&times) });
        let (path, summary) = stats.finish().unwrap();
        assert_eq!((summary.steps, summary.tokens), (2, 4));
        let text = fs::read_to_string(path).unwrap();
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                r#"{"model.forward_ms":1.5,"tokens":2,"position":7,"cache_bytes":64}"#,
                r#"{"model.forward_ms":2.5,"model.sample_ms":0.25,"tokens":2,"proposed":1,"accepted":0,"position":7,"cache_bytes":64}"#,
                concat!(
                    r#"{"summary":{"steps":2,"tokens":4,"#,
                    r#""model.forward_ms":{"count":2,"mean":2.0,"p50":1.5,"p90":2.5,"p99":2.5,"max":2.5},"#,
                    r#""model.sample_ms":{"count":1,"mean":0.25,"p50":0.25,"p90":0.25,"p99":0.25,"max":0.25}}}"#
                ),
            ]
        );
        assert!(text.ends_with('\n'));
        let (path, _) = other.finish().unwrap();
        assert_eq!(fs::read_to_string(path).unwrap(), "{\"summary\":{\"steps\":0,\"tokens\":0}}\n");
    }

    #[test]
    fn percentiles_are_times_that_came_up() {
        // (count, p50, p90, p99) of the times 1 to count.
        for (count, p50, p90, p99) in
            [(1, 1, 1, 1), (2, 1, 2, 2), (10, 5, 9, 10), (100, 50, 90, 99), (1001, 501, 901, 991)]
        {
            let summary = TimeSummary::new((1..=count).rev().map(f64::from).collect());
            let got = [summary.p50, summary.p90, summary.p99, summary.max, summary.mean];
            let mean = (f64::from(count) + 1.0) / 2.0;
            assert_eq!(got, [p50.into(), p90.into(), p99.into(), count.into(), mean]);
            assert_eq!(summary.count, count as usize);
        }
    }

    #[test]
    fn a_refusing_disk_is_reported_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "").unwrap();
        // A file that is open for reading alone refuses every line.
        let mut stats = StepStats::on(fs::File::open(&path).unwrap());
        stats.record(&record(&[(MODEL_FORWARD_MS, 1.0)]));
        stats.record(&record(&[(MODEL_FORWARD_MS, 1.0)]));
        assert_eq!(stats.steps, 0);
        let error = stats.finish().unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        let below = path.join("folder");
        assert!(StepStats::create(&below).is_err());
    }
}
