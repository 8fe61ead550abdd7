use clap::Args;
use firesteel_ort::qnn::{WorkerCommand, serve};
use std::process::ExitCode;

/// Do the job that another firesteel process left in the working directory.
#[derive(Debug, Args)]
pub(crate) struct Worker {}

impl Worker {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        serve()?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The command that leads a new process of this program to its worker.
pub(crate) fn worker_command() -> std::io::Result<WorkerCommand> {
    let program = std::env::current_exe()?;
    Ok(WorkerCommand { program, arguments: vec!["worker".into()] })
}
