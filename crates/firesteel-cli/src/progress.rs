use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar of bytes with time left, on a terminal; nothing elsewhere.
pub(crate) struct ByteProgress {
    bar: ProgressBar,
}

impl ByteProgress {
    pub(crate) fn new(what: &'static str) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10))
        } else {
            ProgressBar::hidden()
        };
        let template = "{msg} [{wide_bar}] {binary_bytes} of {binary_total_bytes}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(what);
        Self { bar }
    }

    /// Takes bytes done and in all.
    pub(crate) fn set(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done.max(self.bar.position()));
    }
}

impl Drop for ByteProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
