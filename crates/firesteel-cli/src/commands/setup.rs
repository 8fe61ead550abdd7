use crate::printer::Printer;
use clap::{Args, Subcommand};
use firesteel_checkpoint::cache_root;
use firesteel_ort::{SetupOptions, setup_ort};
use std::path::PathBuf;
use std::process::ExitCode;

/// Install a pinned library into the cache folder.
#[derive(Debug, Args)]
pub(crate) struct Setup {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Ort(Ort),
}

/// ONNX Runtime, from its PyPI wheel through pip.
#[derive(Debug, Args)]
struct Ort {
    /// Python whose pip fetches the wheel [default: python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Install again what is installed already
    #[arg(long)]
    force: bool,
}

impl Setup {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let What::Ort(Ort { python, force }) = self.what;
        let options = SetupOptions { cache: cache_root()?, python, force };
        let library = setup_ort(options, &mut |line| printer.talk(line))?;
        printer.line(library.display().to_string())?;
        Ok(ExitCode::SUCCESS)
    }
}
