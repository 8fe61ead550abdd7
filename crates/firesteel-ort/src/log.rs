use ort::logging::{LogLevel, LoggerFunction};
use std::collections::VecDeque;
use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};

/// Lines that an error repeats at most.
const LIMIT: usize = 16;

/// Holds back the warnings and errors that ONNX Runtime logs during an operation, until it is
/// known whether the operation failed. If so they belong to the error, because some failures come
/// back as a message that does not name the cause; if not they go to `tracing`.
#[derive(Debug, Clone, Default)]
pub(crate) struct SessionLog(Arc<Mutex<VecDeque<String>>>);

impl SessionLog {
    /// A logger whose warnings and errors are held back here.
    pub(crate) fn logger(&self) -> LoggerFunction {
        let log = self.clone();
        Arc::new(move |level, category, id, location, message| {
            if level < LogLevel::Warning {
                return emit(level, category, id, location, message);
            }
            let mut lines = log.0.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.len() == LIMIT
                && let Some(line) = lines.pop_front()
            {
                tracing::warn!("{line}");
            }
            lines.push_back(message.trim_end().to_owned());
        })
    }

    /// The operation succeeded.
    pub(crate) fn release(&self) {
        for line in self.take() {
            tracing::warn!("{line}");
        }
    }

    /// The operation failed with `message`; returns it with the lines that it does not repeat.
    pub(crate) fn explain(&self, message: &str) -> String {
        let message = message.trim_end();
        let mut text = message.to_owned();
        for line in self.take() {
            if !text.contains(&line) && !line.contains(message) {
                text.push_str("\nlogged: ");
                text.push_str(&line);
            }
        }
        text
    }

    fn take(&self) -> VecDeque<String> {
        take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The logger of everything that belongs to no session.
pub(crate) fn environment_logger() -> LoggerFunction {
    Arc::new(emit)
}

fn emit(level: LogLevel, category: &str, id: &str, location: &str, message: &str) {
    let message = message.trim_end();
    match level {
        LogLevel::Verbose => tracing::trace!(category, id, location, "{message}"),
        LogLevel::Info => tracing::debug!(category, id, location, "{message}"),
        LogLevel::Warning => tracing::warn!(category, id, location, "{message}"),
        LogLevel::Error | LogLevel::Fatal => {
            tracing::error!(category, id, location, "{message}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_takes_the_lines_that_say_more() {
        let log = SessionLog::default();
        let logger = log.logger();
        let write = |level, message: &str| logger(level, "category", "id", "file.cc", message);
        write(LogLevel::Info, "loading");
        write(LogLevel::Error, "Exception during run: no kernel\n");
        write(LogLevel::Warning, "backend library is missing\n");
        assert_eq!(log.explain("no kernel\n"), "no kernel\nlogged: backend library is missing");
        assert_eq!(log.explain("again"), "again");

        for i in 0..20 {
            write(LogLevel::Warning, &format!("line {i}."));
        }
        let text = log.explain("failed");
        assert_eq!(text.lines().count(), 1 + LIMIT);
        assert!(text.ends_with("logged: line 19."), "{text}");

        write(LogLevel::Warning, "harmless");
        log.release();
        assert_eq!(log.explain("later"), "later");
    }
}
