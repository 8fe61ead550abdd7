//! A mapped file that becomes shorter while it is used.

use firesteel_checkpoint::{MappedFile, Replace, StagedFolder, remove_staged, watch_lost_pages};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

const FOLDER: &str = "FIRESTEEL_TEST_FOLDER";
const SIGNAL: &str = "FIRESTEEL_TEST_SIGNAL";

/// The body of the child process; nothing when run as a test of its own.
#[test]
fn child_loses_a_page() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    let told = || {
        remove_staged();
        println!("told");
        std::process::exit(7);
    };
    watch_lost_pages(told).unwrap();
    let _staged = StagedFolder::create(&folder.join("out"), Replace::Never).unwrap();
    let path = folder.join("mapped");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let bytes = MappedFile::open(&path).unwrap().bytes();
    println!("{}", bytes[1 << 19]);
    if std::env::var_os(SIGNAL).is_some() {
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::BUS).unwrap();
    } else {
        std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    }
    // Not inside of println, whose lock the thread would hold for ever.
    let lost = bytes[1 << 19];
    println!("{lost}");
}

fn child(folder: &Path, signal: bool) -> Output {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "lost_pages::child_loses_a_page", "--nocapture"]).env(FOLDER, folder);
    if signal {
        child.env(SIGNAL, "1");
    }
    child.output().unwrap()
}

#[test]
fn a_lost_page_is_told_and_nothing_half_written_stays() {
    let folder = tempfile::tempdir().unwrap();
    let output = child(folder.path(), false);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!((output.status.code(), output.status.signal()), (Some(7), None), "{said}");
    assert!(said.contains("told"), "{said}");
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["mapped"]);
}

#[test]
fn a_signal_that_means_something_else_does_what_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let output = child(folder.path(), true);
    assert_eq!(output.status.signal(), Some(7), "{output:?}");
}
