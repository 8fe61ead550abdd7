use crate::printer::Printer;
use clap::{Args, Subcommand};
use firesteel_checkpoint::cache_root;
use firesteel_ort::{OrtError, SetupOptions, setup_ort, setup_qnn};
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
    /// ONNX Runtime, from its PyPI wheel through pip
    Ort(Source),
    /// Qualcomm's compiler and emulator for the HTP, from the PyPI wheel of ONNX Runtime's QNN
    /// plugin through pip; under Qualcomm's licence, which is kept beside it
    Qnn(Source),
}

#[derive(Debug, Args)]
struct Source {
    /// Python whose pip fetches the wheel [default: python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Install again what is installed already
    #[arg(long)]
    force: bool,
}

/// Installs a library and returns its path.
type Setter = fn(SetupOptions, &mut dyn FnMut(&str)) -> Result<PathBuf, OrtError>;

impl Setup {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let (Source { python, force }, setup): (Source, Setter) = match self.what {
            What::Ort(source) => (source, setup_ort),
            What::Qnn(source) => (source, setup_qnn),
        };
        let options = SetupOptions { cache: cache_root()?, python, force };
        let library = setup(options, &mut |line| printer.talk(line))?;
        printer.line(library.display().to_string())?;
        Ok(ExitCode::SUCCESS)
    }
}
