use serde::Serialize;
use std::io::{self, IsTerminal, Write};

/// Where output goes: data to stdout, talk to stderr.
pub(crate) struct Printer {
    colour: bool,
}

impl Printer {
    pub(crate) fn new() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { colour: wanted && io::stderr().is_terminal() }
    }

    /// Whether talk is coloured.
    pub(crate) fn colour(&self) -> bool {
        self.colour
    }

    /// Writes a line of data.
    pub(crate) fn line(&mut self, line: impl AsRef<str>) -> io::Result<()> {
        self.data(&format!("{}\n", line.as_ref()))
    }

    /// Writes data as it is, at once.
    pub(crate) fn data(&mut self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        written.map_err(|error| io::Error::new(error.kind(), format!("standard output: {error}")))
    }

    /// Writes a value as JSON.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        Ok(self.line(serde_json::to_string_pretty(value)?)?)
    }

    /// Says something to the person at the terminal.
    pub(crate) fn talk(&mut self, line: &str) {
        // Nobody can be told when stderr is closed.
        let _ = writeln!(io::stderr(), "{line}");
    }

    /// Says a warning.
    pub(crate) fn warn(&mut self, line: &str) {
        let label = if self.colour { "\x1b[33mwarning\x1b[0m" } else { "warning" };
        self.talk(&format!("{label}: {}", plain(line)));
    }

    /// Says an error and its causes, each once.
    pub(crate) fn error(&mut self, error: &anyhow::Error) {
        let mut message = String::new();
        for cause in error.chain() {
            let text = cause.to_string();
            // Transparent errors repeat their source.
            if !message.contains(&text) {
                if !message.is_empty() {
                    message.push_str(": ");
                }
                message.push_str(&text);
            }
        }
        let label = if self.colour { "\x1b[31merror\x1b[0m" } else { "error" };
        self.talk(&format!("{label}: {}", plain(&message)));
    }
}

/// Longest message, in characters.
const MESSAGE_LIMIT: usize = 4000;

/// A message that may quote a file: what a terminal would act on is escaped, and it ends somewhere.
fn plain(message: &str) -> String {
    let mut text = String::new();
    for c in message.chars().take(MESSAGE_LIMIT) {
        let acts = c.is_control() && c != '\n';
        let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if acts || reorders { text.extend(c.escape_unicode()) } else { text.push(c) }
    }
    if message.chars().nth(MESSAGE_LIMIT).is_some() {
        text.push('…');
    }
    text
}

/// Whether an error comes from a reader that closed its end.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Rows of cells as lines with aligned columns; the first column is aligned left, the others
/// right.
pub(crate) fn table(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    rows.iter()
        .map(|row| {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, &width))| {
                    if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                })
                .collect();
            cells.join("  ").trim_end().to_owned()
        })
        .collect()
}

/// Bytes in MiB with one decimal.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
