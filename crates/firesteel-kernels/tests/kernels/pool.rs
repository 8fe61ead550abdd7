use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use firesteel_kernels::{KernelError, Pool};

#[test]
fn every_task_runs_once() {
    for threads in [0, 1, 2, 3, 8] {
        let pool = Pool::new(threads).unwrap();
        assert_eq!(pool.threads(), threads.max(1));
        for count in [0, 1, 2, 7, 100] {
            for _ in 0..200 {
                let counts: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                let task = |i: usize| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                };
                pool.run(count, &task).unwrap();
                let all_once = counts.iter().all(|c| c.load(Ordering::Relaxed) == 1);
                assert!(all_once, "{threads} threads, {count} tasks");
            }
        }
    }
}

#[test]
fn parked_threads_wake_and_parked_pools_stop() {
    let pool = Pool::new(3).unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(2));
        let sum = AtomicUsize::new(0);
        let task = |i: usize| {
            std::thread::sleep(Duration::from_micros(200));
            sum.fetch_add(i, Ordering::Relaxed);
        };
        pool.run(10, &task).unwrap();
        assert_eq!(sum.into_inner(), 45);
    }
}

#[test]
fn a_panic_is_an_error_and_the_pool_goes_on() {
    for threads in [1, 3] {
        let pool = Pool::new(threads).unwrap();
        for _ in 0..20 {
            let ran = AtomicUsize::new(0);
            let task = |i: usize| {
                ran.fetch_add(1, Ordering::Relaxed);
                assert_ne!(i, 5, "task five");
            };
            let error = pool.run(10, &task).unwrap_err();
            let KernelError::TaskPanicked { message } = error else { panic!() };
            assert!(message.contains("task five"), "{message}");
            assert_eq!(ran.into_inner(), 10);
            pool.run(10, &|_| {}).unwrap();
        }
    }
}

/// What is dropped panics, as a value of anybody's may.
struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        // A second panic in one thread at once would end the test's process.
        if !std::thread::panicking() {
            std::panic::panic_any("dropped what a task panicked with");
        }
    }
}

#[test]
fn what_a_task_panics_with_is_not_dropped_while_others_use_the_task() {
    for threads in [1, 2, 4] {
        let pool = Pool::new(threads).unwrap();
        for _ in 0..20 {
            let ran: Vec<AtomicUsize> = (0..64).map(|_| AtomicUsize::new(0)).collect();
            let task = |i: usize| {
                ran[i].fetch_add(1, Ordering::Relaxed);
                if i.is_multiple_of(3) {
                    std::panic::panic_any(PanicsWhenDropped);
                }
            };
            // The call returns, which it does only when no thread uses the task any more.
            let error = pool.run(ran.len(), &task).unwrap_err();
            let KernelError::TaskPanicked { message } = error else { panic!() };
            assert_eq!(message, "no message");
            assert!(ran.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            pool.run(10, &|_| {}).unwrap();
        }
    }
}

#[test]
fn nested_and_concurrent_calls_finish() {
    let pool = Pool::new(2).unwrap();
    let sum = AtomicUsize::new(0);
    let inner = |i: usize| {
        sum.fetch_add(i, Ordering::Relaxed);
    };
    pool.run(4, &|_| pool.run(5, &inner).unwrap()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..500 {
                    pool.run(5, &inner).unwrap();
                }
            });
        }
    });
    assert_eq!(sum.into_inner(), 40 + 3 * 500 * 10);
}
