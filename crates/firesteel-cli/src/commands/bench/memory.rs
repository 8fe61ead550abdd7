//! Anonymous memory of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

/// Samples the process's anonymous memory in a thread of its own.
pub(super) struct MemoryWatch {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl MemoryWatch {
    pub(super) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let peak = Arc::new(AtomicU64::new(0));
        let (stop_too, peak_too) = (stop.clone(), peak.clone());
        let thread = thread::spawn(move || {
            // Once at least, however soon it is stopped.
            loop {
                if let Some(bytes) = rss_anon() {
                    peak_too.fetch_max(bytes, Ordering::Relaxed);
                }
                if stop_too.load(Ordering::Relaxed) {
                    break;
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        Self { stop, peak, thread }
    }

    /// The largest value seen, where the system tells.
    pub(super) fn stop(self) -> Option<u64> {
        self.stop.store(true, Ordering::Relaxed);
        // A thread that failed has measured nothing.
        self.thread.join().ok()?;
        let peak = self.peak.load(Ordering::Relaxed);
        (peak > 0).then_some(peak)
    }
}

/// Resident anonymous memory of this process, where the system tells.
pub(super) fn rss_anon() -> Option<u64> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}
