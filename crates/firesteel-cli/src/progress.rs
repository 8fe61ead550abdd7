use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar of bytes or tokens with time left, on a terminal; nothing elsewhere.
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    pub(crate) fn new(what: &'static str) -> Self {
        Self::with_amounts(what, "{binary_bytes} of {binary_total_bytes}")
    }

    pub(crate) fn of_tokens(what: &'static str) -> Self {
        Self::with_amounts(what, "{pos} of {len} tokens")
    }

    fn with_amounts(what: &'static str, amounts: &str) -> Self {
        let bar = if std::io::stderr().is_terminal() {
            ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10))
        } else {
            ProgressBar::hidden()
        };
        let template = format!("{{msg}} [{{wide_bar}}] {amounts}, {{eta}} left");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.set_message(what);
        Self { bar }
    }

    /// Takes what is done and in all.
    pub(crate) fn set(&self, done: u64, total: u64) {
        self.bar.set_length(total);
        self.bar.set_position(done.max(self.bar.position()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
