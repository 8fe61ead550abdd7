//! A persistent pool of worker threads.
//!
//! This module holds the crate's only shared-memory unsafe code: the job that workers borrow from
//! the caller's stack, and [`Disjoint`], through which tasks write to parts of one slice.
#![allow(unsafe_code, reason = "a job borrowed across threads, and disjoint writes to one slice")]

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::KernelError;

/// How long a thread spins for work before it parks.
const SPIN: Duration = Duration::from_micros(50);

/// A counter in a cache line of its own, because one thread takes most of its numbers.
#[derive(Default)]
#[repr(align(128))]
struct Next(AtomicUsize);

/// A borrowed job: `task(i)` for every `i` below `count`. The lifetime is erased; see [`Shared`].
#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize) + Sync),
    count: usize,
}

/// What the caller and the workers share.
///
/// `job` is written only by the caller that holds `Pool::caller`, while `open` is false and
/// `active` was seen to be 0 after `open` became false. It is read only by a worker that counted
/// itself in `active` and then saw `open`. The caller returns only after it closed the job and saw
/// `active` at 0. All four accesses are sequentially consistent, so a worker either sees that the
/// job is closed or is waited for.
struct Shared {
    job: UnsafeCell<Option<Job>>,
    open: AtomicBool,
    active: AtomicUsize,
    /// The next task of each thread's share of the job.
    next: Vec<Next>,
    /// Counts the jobs, so that a worker does not enter one twice.
    generation: AtomicUsize,
    stop: AtomicBool,
    panic: Mutex<Option<String>>,
    caller: Mutex<Option<Thread>>,
    parked: Vec<AtomicBool>,
}

// SAFETY: `job` is the only field that is not Sync, and the protocol above orders its accesses;
// the pointer in it is to a Sync closure.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Shared {
    /// Takes tasks until there are none: first those of thread `own`, one after the other, because
    /// what they read lies side by side in memory, then those that are left of the others'.
    fn work(&self, job: Job, own: usize) {
        // SAFETY: the caller of `Pool::run` keeps the closure alive until `active` is 0, and this
        // thread is the caller or is counted in `active`.
        let task = unsafe { &*job.task };
        let threads = self.next.len();
        for thread in (own..threads).chain(0..own) {
            loop {
                let index = self.next[thread].0.fetch_add(1, Ordering::Relaxed);
                if index >= first_of_share(job.count, thread + 1, threads) {
                    break;
                }
                if let Err(message) = run_task(task, index) {
                    let mut slot = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
                    slot.get_or_insert(message);
                }
            }
        }
    }

    /// The life of worker `index`.
    fn serve(&self, index: usize) {
        let mut seen = 0;
        loop {
            let parked = &self.parked[index];
            wait(parked, || {
                self.generation.load(Ordering::SeqCst) != seen || self.stop.load(Ordering::SeqCst)
            });
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            seen = self.generation.load(Ordering::SeqCst);
            self.active.fetch_add(1, Ordering::SeqCst);
            if self.open.load(Ordering::SeqCst) {
                // SAFETY: this thread is counted in `active` and saw the job open.
                if let Some(job) = unsafe { *self.job.get() } {
                    self.work(job, index + 1);
                }
            }
            if self.active.fetch_sub(1, Ordering::SeqCst) == 1 && !self.open.load(Ordering::SeqCst)
            {
                let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(thread) = caller.as_ref() {
                    thread.unpark();
                }
            }
        }
    }
}

/// The first task of the share of a thread, or the end of all of them.
fn first_of_share(count: usize, thread: usize, threads: usize) -> usize {
    count / threads * thread + (count % threads).min(thread)
}

/// Spins until `ready`, for a bounded time, then parks. Whoever makes `ready` true and then finds
/// `parked` set must unpark this thread.
fn wait(parked: &AtomicBool, ready: impl Fn() -> bool) {
    let mut started = None;
    loop {
        for _ in 0..32 {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() > SPIN {
            break;
        }
    }
    parked.store(true, Ordering::SeqCst);
    while !ready() {
        thread::park();
    }
    parked.store(false, Ordering::SeqCst);
}

/// Runs one task and never unwinds, because others may hold what the caller's stack owns. The
/// error is the message of its panic.
///
/// What a task panicked with is a value of anybody's, whose drop may panic in turn. It is dropped
/// only where it is text, and never otherwise: that leaks it, once for each such panic.
fn run_task(task: &(dyn Fn(usize) + Sync), index: usize) -> Result<(), String> {
    let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index))) else { return Ok(()) };
    let other = match payload.downcast::<&str>() {
        Ok(text) => return Err((*text).to_owned()),
        Err(other) => other,
    };
    Err(match other.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => {
            std::mem::forget(other);
            "no message".to_owned()
        }
    })
}

/// Persistent worker threads that run the tasks of one job at a time.
///
/// Threads spin for a short time between jobs and park after it. Dropping the pool joins them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a job.
    busy: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// A pool of `threads` threads, of which the caller of [`Pool::run`] is one; 0 counts as 1.
    ///
    /// # Errors
    ///
    /// The operating system refuses a thread.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        let count = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            open: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            next: (0..=count).map(|_| Next::default()).collect(),
            generation: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            caller: Mutex::new(None),
            parked: (0..count).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(count), busy: Mutex::new(()) };
        for index in 0..count {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new()
                .name(format!("firesteel-{index}"))
                .spawn(move || shared.serve(index))
                .map_err(|error| KernelError::Thread { index, reason: error.to_string() })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// How many threads run a job, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(i)` once for every `i` below `count`, on any thread in any order, and returns when
    /// all are done.
    ///
    /// One job runs at a time: a call from within a task, or from a second thread while a job runs,
    /// does its tasks on the calling thread alone.
    ///
    /// # Errors
    ///
    /// A task panicked. The other tasks have run.
    pub fn run(&self, count: usize, task: &(dyn Fn(usize) + Sync)) -> Result<(), KernelError> {
        let guard = if count > 1 && !self.workers.is_empty() {
            match self.busy.try_lock() {
                Ok(guard) => Some(guard),
                Err(std::sync::TryLockError::Poisoned(error)) => Some(error.into_inner()),
                Err(std::sync::TryLockError::WouldBlock) => None,
            }
        } else {
            None
        };
        if guard.is_none() {
            let mut first = None;
            for index in 0..count {
                if let Err(message) = run_task(task, index) {
                    first.get_or_insert(message);
                }
            }
            return first.map_or(Ok(()), |message| Err(KernelError::TaskPanicked { message }));
        }

        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is dropped from use before this function
        // returns, and nothing between here and the wait below can unwind: of what is not this
        // module's own only tasks run, within `run_task`.
        let task = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(
                task,
            )
        };
        let job = Job { task, count };
        *shared.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        for (thread, next) in shared.next.iter().enumerate() {
            next.0.store(first_of_share(count, thread, self.threads()), Ordering::Relaxed);
        }
        // SAFETY: this thread holds `busy`, the job is closed, and the last caller saw `active` at 0
        // after closing it; a worker that counts itself now does not read before it sees `open`.
        unsafe { *shared.job.get() = Some(job) };
        shared.open.store(true, Ordering::SeqCst);
        shared.generation.fetch_add(1, Ordering::SeqCst);
        for (parked, worker) in shared.parked.iter().zip(&self.workers) {
            if parked.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }

        shared.work(job, 0);
        shared.open.store(false, Ordering::SeqCst);
        wait(&AtomicBool::new(false), || shared.active.load(Ordering::SeqCst) == 0);
        let message = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        message.map_or(Ok(()), |message| Err(KernelError::TaskPanicked { message }))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its tasks, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

/// A mutable slice whose parts are handed to tasks.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    length: usize,
    marker: PhantomData<&'a mut [T]>,
}

// SAFETY: the contract of `part` makes every access exclusive; T moves between threads.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), length: slice.len(), marker: PhantomData }
    }

    /// The elements in `range`. One that does not fit panics like an index that does not, so that
    /// nothing is left unwritten in silence; the pool makes an error of it.
    ///
    /// # Safety
    ///
    /// While the result lives, no other part that overlaps it may exist.
    #[allow(clippy::mut_from_ref, reason = "the contract makes the parts exclusive")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.length,
            "part {range:?} of {} elements",
            self.length
        );
        // SAFETY: the range lies in the slice that `start` came from, and the caller promises that
        // no other reference to these elements exists.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start)
        }
    }
}
