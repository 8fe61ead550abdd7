//! The `firesteel` command: one verb a stage, in the order of the data.

mod commands;
mod kit;
mod printer;
mod progress;
mod source;
mod texts;

use clap::{Parser, Subcommand};
use printer::Printer;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};

/// Takes an on-device language model from its published checkpoint to the phone.
#[derive(Debug, Parser)]
#[command(name = "firesteel", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Inspect(commands::inspect::Inspect),
    Synth(commands::synth::Synth),
    Export(commands::export::Export),
    Calibrate(commands::calibrate::Calibrate),
    Quantize(commands::quantize::Quantize),
    Compile(commands::compile::Compile),
    Check(commands::check::Check),
    Profile(commands::profile::Profile),
    Generate(Box<commands::generate::Generate>),
    Bench(commands::bench::Bench),
    Setup(commands::setup::Setup),
    #[command(hide = true)]
    Worker(commands::worker::Worker),
}

/// What the last panic said, and where.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Exit code for the user's input: a bad argument, file or result.
const USER: u8 = 1;

/// Exit code after a signal, as shells give it for SIGINT.
const INTERRUPTED: i32 = 130;

/// Exit code for our own fault.
const OURS: u8 = 2;

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("FIRESTEEL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("off"));
    let colour = Printer::new().colour();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.with_ansi(colour).init();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let failed = error.use_stderr();
            // Help and version go to stdout and are no error; nothing can be done if that fails.
            let _ = error.print();
            return ExitCode::from(if failed { USER } else { 0 });
        }
    };
    // What is half written goes, whichever signal ends the program. Without a handler (no thread
    // can be had) the next run removes it.
    let _ = ctrlc::set_handler(|| {
        firesteel_checkpoint::remove_staged();
        std::process::exit(INTERRUPTED);
    });
    // A mapped file can become shorter under us. Without the watch the system's words are shorter.
    let _ = firesteel_checkpoint::watch_lost_pages(|| {
        firesteel_checkpoint::remove_staged();
        Printer::new().talk(
            "error: a model file became shorter while it was read, or its disk failed; nothing \
             was written, start again when the file is whole",
        );
        std::process::exit(i32::from(USER));
    });
    // A library may panic on a hostile file, which is caught and told as that file's error; what
    // is not caught is told at the end.
    std::panic::set_hook(Box::new(|panic| {
        let mut last = PANIC.lock().unwrap_or_else(PoisonError::into_inner);
        *last = Some(panic.to_string());
    }));
    let mut printer = Printer::new();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| match cli.command {
        Command::Inspect(command) => command.run(&mut printer),
        Command::Synth(command) => command.run(&mut printer),
        Command::Export(command) => command.run(&mut printer),
        Command::Calibrate(command) => command.run(&mut printer),
        Command::Quantize(command) => command.run(&mut printer),
        Command::Compile(command) => command.run(&mut printer),
        Command::Check(command) => command.run(&mut printer),
        Command::Profile(command) => command.run(&mut printer),
        Command::Generate(command) => command.run(&mut printer),
        Command::Bench(command) => command.run(&mut printer),
        Command::Setup(command) => command.run(&mut printer),
        Command::Worker(command) => command.run(),
    }));
    let mut printer = Printer::new();
    match outcome {
        Ok(Ok(code)) => code,
        // A reader that closed the pipe has seen enough.
        Ok(Err(error)) if printer::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            printer.error(&error);
            ExitCode::from(USER)
        }
        Err(_) => {
            let last = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
            printer.talk(&format!(
                "error: firesteel failed; this is a fault of the program, please report it: {}",
                last.unwrap_or_default()
            ));
            ExitCode::from(OURS)
        }
    }
}
