use super::diagnosis::diagnose;
use super::worker::{JOB, Job};
use crate::OrtError;
use fs_err as fs;
use std::ffi::OsString;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The program that does the work of a child process: its arguments lead to [`serve`](super::serve).
#[derive(Debug, Clone)]
pub struct WorkerCommand {
    /// The program, usually the running one.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

/// What a child process may use; beyond it is ended.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of memory that are resident; `None` for nine tenths of what is free when it starts.
    pub memory: Option<u64>,
    /// Time.
    pub time: Duration,
}

/// What a child process has used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) peak_memory: u64,
    pub(crate) time: Duration,
}

/// Bytes of memory that programs could still get, by the kernel's estimate; `None` where it gives
/// none.
fn free_memory() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// A line such as `VmRSS:  1234 kB`, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Where a child's prints go, in its folder. Both streams share one file, in order.
const LOG: &str = "output.log";

/// Bytes at the end of the log that are read.
const LOG_TAIL: u64 = 64 << 10;

/// Lines of the log that an error repeats.
const LOG_LINES: usize = 12;

/// A running child.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) child: Child,
    folder: PathBuf,
    model: String,
    action: &'static str,
    memory_limit: u64,
    time_limit: Duration,
    usage: Usage,
    started: Instant,
    /// Time that it had nothing to do.
    idle: Duration,
    /// Since when it has nothing to do.
    waiting: Option<Instant>,
}

impl Worker {
    /// Starts `command` on `job` with `folder` as its working directory. `pipes` connects its
    /// standard input and output with this process.
    pub(crate) fn start(
        command: &WorkerCommand,
        job: &Job,
        folder: &Path,
        pipes: bool,
        limits: Limits,
    ) -> Result<Self, OrtError> {
        let most = || free_memory().map_or(u64::MAX, |free| free / 10 * 9);
        let (memory_limit, time_limit) = (limits.memory.unwrap_or_else(most), limits.time);
        let (model, action) = (job.model(), job.action());
        let text = serde_json::to_vec_pretty(job).map_err(std::io::Error::other)?;
        fs::write(folder.join(JOB), text)?;
        let log = fs::File::create(folder.join(LOG))?.into_parts().0;
        let mut process = Command::new(&command.program);
        process
            .args(&command.arguments)
            .current_dir(folder)
            // What the runtime logs belongs to the captured output.
            .env("FIRESTEEL_LOG", "warn")
            .env("NO_COLOR", "1")
            .stderr(log.try_clone()?);
        if pipes {
            process.stdin(Stdio::piped()).stdout(Stdio::piped());
        } else {
            process.stdin(Stdio::null()).stdout(log);
        }
        let child = process.spawn().map_err(|error| OrtError::Child {
            model: model.clone(),
            action,
            reason: format!("could not start {}: {error}", command.program.display()),
            diagnoses: Vec::new(),
            log: String::new(),
        })?;
        let (usage, started) = (Usage::default(), Instant::now());
        let (idle, waiting) = (Duration::ZERO, None);
        let folder = folder.to_owned();
        Ok(Self {
            child,
            folder,
            model,
            action,
            memory_limit,
            time_limit,
            usage,
            started,
            idle,
            waiting,
        })
    }

    /// From now on until [`Worker::busy`] its time does not count.
    pub(crate) fn wait(&mut self) {
        self.waiting.get_or_insert_with(Instant::now);
    }

    /// It has something to do.
    pub(crate) fn busy(&mut self) {
        self.idle += self.waiting.take().map_or(Duration::ZERO, |since| since.elapsed());
    }

    /// Time that it has worked.
    fn worked(&self) -> Duration {
        let waiting = self.waiting.map_or(Duration::ZERO, |since| since.elapsed());
        self.started.elapsed().saturating_sub(self.idle + waiting)
    }

    /// What the child has used until now.
    pub(crate) fn usage(&mut self) -> Usage {
        self.usage.time = self.worked();
        // The file is gone when the child is; then the last figure stays.
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        if let Some(peak) = status.ok().and_then(|status| kibibytes(&status, "VmHWM:")) {
            self.usage.peak_memory = self.usage.peak_memory.max(peak);
        }
        self.usage
    }

    /// Ends the child when it is beyond a limit.
    pub(crate) fn enforce(&mut self) -> Result<(), OrtError> {
        let usage = self.usage();
        let reason = if usage.peak_memory > self.memory_limit {
            format!(
                "was ended at {} MiB of memory, the limit is {} MiB; raise --memory-limit, or \
                 compile fewer layers at once (--split)",
                usage.peak_memory >> 20,
                self.memory_limit >> 20
            )
        } else if usage.time > self.time_limit {
            format!(
                "was ended after {} s, the limit is {} s; raise --time-limit",
                usage.time.as_secs(),
                self.time_limit.as_secs()
            )
        } else {
            return Ok(());
        };
        self.end();
        Err(self.failure(reason))
    }

    /// Waits for the end; `heartbeat` hears the usage meanwhile.
    pub(crate) fn finish(&mut self, heartbeat: &mut dyn FnMut(Usage)) -> Result<Usage, OrtError> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                self.usage.time = self.worked();
                if status.success() {
                    return Ok(self.usage);
                }
                return Err(self.failure(ended(status)));
            }
            self.enforce()?;
            heartbeat(self.usage);
            std::thread::sleep(INTERVAL);
        }
    }

    /// Kills the child and waits for its end.
    pub(crate) fn end(&mut self) {
        // It may have ended by itself, which is the aim.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The error of this child, with its last lines and what is known about them.
    pub(crate) fn failure(&self, reason: String) -> OrtError {
        let log = self.log();
        let diagnoses = diagnose(&format!("{reason}\n{log}"));
        let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
        let first = lines.len().saturating_sub(LOG_LINES);
        OrtError::Child {
            model: self.model.clone(),
            action: self.action,
            reason,
            diagnoses,
            log: lines.get(first..).unwrap_or_default().join("\n"),
        }
    }

    /// The end of what the child and its libraries wrote.
    pub(crate) fn log(&self) -> String {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = fs::File::open(self.folder.join(LOG))?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL)))?;
            let mut bytes = Vec::new();
            file.take(LOG_TAIL).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        read().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// Time between two looks at a child.
const INTERVAL: Duration = Duration::from_millis(20);

/// The signal that ended a process.
#[cfg(unix)]
fn signal_of(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

/// The signal that ended a process: there are none here.
#[cfg(not(unix))]
fn signal_of(_: ExitStatus) -> Option<i32> {
    None
}

/// How a process ended, as the rest of a sentence.
pub(crate) fn ended(status: ExitStatus) -> String {
    match (signal_of(status), status.code()) {
        (Some(9), _) => "was killed; if nobody did it, the machine ran out of memory: set \
                         --memory-limit, or compile fewer layers at once (--split)"
            .to_owned(),
        (Some(signal @ (4 | 6 | 7 | 8 | 11)), _) => {
            format!("crashed (signal {signal}) inside Qualcomm's libraries or ONNX Runtime")
        }
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, code) => format!("ended with exit code {}", code.unwrap_or(-1)),
    }
}
