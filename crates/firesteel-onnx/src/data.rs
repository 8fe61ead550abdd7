//! Streams constants into data files.

use crate::error::OnnxError;
use crate::plan::{DataFile, Part};
use firesteel_checkpoint::write_all_at;
use firesteel_graph::Constant;
use firesteel_tensor::Buffer;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Bytes that a thread makes and writes at once: a multiple of every element's size, and small
/// enough to be still in the core's cache when it is written.
const CHUNK: usize = 512 << 10;

/// Most threads; with one buffer each they stay well below the memory an export may use.
const MAX_THREADS: usize = 8;

/// Bytes written before the disk is asked to store them.
const FLUSH: u64 = 64 << 20;

/// How long to wait for more bytes to store.
const PAUSE: Duration = Duration::from_millis(2);

/// Bytes of a part: the next one that a free thread takes.
struct Chunk<'a> {
    file: &'a fs_err::File,
    part: &'a Part,
    start: u64,
    length: usize,
}

/// Creates the files in `folder` and fills them.
///
/// Threads take chunks in file order. A file system lets one thread write to a file at a time, so
/// the others make their chunks meanwhile.
pub(crate) fn write(
    folder: &Path,
    files: &[DataFile],
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), OnnxError> {
    let mut open = Vec::with_capacity(files.len());
    for file in files {
        let handle = fs_err::File::create_new(folder.join(&file.name))?;
        // Gaps between parts become zeros.
        handle.set_len(file.length)?;
        open.push(handle);
    }
    let mut chunks = Vec::new();
    for (file, handle) in files.iter().zip(&open) {
        for part in &file.parts {
            for start in (0..part.length).step_by(CHUNK) {
                let length = (part.length - start).min(CHUNK as u64) as usize;
                chunks.push(Chunk { file: handle, part, start, length });
            }
        }
    }
    let next = AtomicUsize::new(0);
    let done = AtomicU64::new(0);
    let failure = OnceLock::new();
    let work = || {
        let mut buffer = Buffer::default();
        while failure.get().is_none() {
            let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) else {
                break;
            };
            if let Err(error) = chunk.write(&mut buffer) {
                // The first error of any thread is the one reported.
                let _ = failure.set(error);
                break;
            }
            let written = chunk.length as u64;
            progress(done.fetch_add(written, Ordering::Relaxed) + written);
        }
    };
    let finished = AtomicBool::new(false);
    // Left alone, the system starts to store the bytes late, and everything waits for the disk at
    // the end. The system reports a failure once, so it must not be lost here.
    let flush = || {
        let mut flushed = 0;
        while !finished.load(Ordering::Acquire) {
            let written = done.load(Ordering::Relaxed);
            if written - flushed < FLUSH {
                std::thread::park_timeout(PAUSE);
                continue;
            }
            if let Err(error) = open.iter().try_for_each(fs_err::File::sync_data) {
                let _ = failure.set(error.into());
                break;
            }
            flushed = written;
        }
    };
    std::thread::scope(|scope| {
        let flusher = std::thread::Builder::new().spawn_scoped(scope, flush);
        std::thread::scope(|scope| {
            for _ in 1..threads.clamp(1, MAX_THREADS).min(chunks.len()) {
                // Without a further thread the calling one does all the work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        finished.store(true, Ordering::Release);
        if let Ok(flusher) = flusher {
            flusher.thread().unpark();
        }
    });
    failure.into_inner().map_or(Ok(()), Err)
}

impl Chunk<'_> {
    fn write(&self, buffer: &mut Buffer) -> Result<(), OnnxError> {
        let path = self.file.path();
        let fail = |problem: String| OnnxError::Data {
            constant: self.part.name.clone(),
            file: path.into(),
            problem,
        };
        let bytes = match &self.part.data {
            Constant::Tensor(tensor) => usize::try_from(self.start)
                .ok()
                .and_then(|start| tensor.bytes().get(start..start.checked_add(self.length)?))
                .ok_or_else(|| fail("the tensor is shorter than its shape".into()))?,
            Constant::Source(source) => {
                if buffer.is_empty() {
                    *buffer = Buffer::zeroed(CHUNK);
                }
                let out = &mut buffer.bytes_mut()[..self.length];
                let first = u128::from(self.start) * 8 / self.part.dtype.bits() as u128;
                let first = usize::try_from(first)
                    .map_err(|_| fail("has more elements than can be addressed".into()))?;
                source.write(first, out).map_err(fail)?;
                out
            }
        };
        let offset = self.part.offset.checked_add(self.start);
        offset
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))
            .and_then(|offset| write_all_at(self.file.file(), bytes, offset))
            .map_err(|error| fail(format!("failed to write: {error}")))
    }
}
