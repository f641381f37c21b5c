use super::super::SLOT_SIZE;
use super::super::testing::{AT, SLOT, Words, bytes};
use super::super::{Action, boundary, instruction_len, text};
use super::*;
use crate::Regs;
use crate::testing::at_least;
use expect_test::{Expect, expect};
use proptest::prelude::*;

/// Checks how each of the `instructions`, which are separated by whitespace, is treated. `expected` has one line
/// for each.
fn check(instructions: &str, expected: Expect) {
    let lines = instructions.split_whitespace().map(|hex| {
        let code = bytes(hex);
        let fate = match classify(&code, AT) {
            Ok(displaced) => {
                assert_eq!(displaced.bytes(), code, "{hex} is one instruction");
                match displaced.action() {
                    Action::Emulate(_) if displaced.boosted(SLOT).is_ok() => "emulate".to_owned(),
                    Action::Emulate(_) => "emulate only".to_owned(),
                    Action::Boost => {
                        displaced.boosted(SLOT).unwrap();
                        "boost".to_owned()
                    }
                }
            }
            Err(refusal) => format!("refuse {refusal:?}"),
        };
        format!("{:44} {fate}\n", text(&code, AT))
    });
    expected.assert_eq(&lines.collect::<String>());
}

#[test]
fn nops_of_every_length_are_emulated() {
    check(
        "90 6690 0f1f00 0f1f4000 0f1f440000 660f1f440000 0f1f8000000000 0f1f840000000000
         660f1f840000000000 66662e0f1f840000000000 6666662e0f1f840000000000
         66666666662e0f1f840000000000 3e0f1f440000 0f1fc0 480f1fc0 f30f1efa",
        expect![[r#"
            nop                                          emulate
            xchg ax, ax                                  emulate
            nop [rax]                                    emulate
            nop [rax]                                    emulate
            nop [rax+rax]                                emulate
            nop [rax+rax]                                emulate
            nop [rax]                                    emulate
            nop [rax+rax]                                emulate
            nop [rax+rax]                                emulate
            nop [rax+rax]                                emulate
            nop [rax+rax]                                emulate
            nop [rax+rax]                                emulate
            nop [rax+rax]                                emulate
            nop eax                                      emulate
            nop rax                                      emulate
            endbr64                                      emulate
        "#]],
    );
}

#[test]
fn pushes_pops_and_moves_between_registers_are_emulated() {
    check(
        "50 54 55 4157 fff0 58 5c 5d 415c 8fc0 4889e5 488bec 4989fc 89ff 8bc7 4189c0 9c",
        expect![[r#"
            push rax                                     emulate
            push rsp                                     emulate
            push rbp                                     emulate
            push r15                                     emulate
            push rax                                     emulate
            pop rax                                      emulate
            pop rsp                                      emulate
            pop rbp                                      emulate
            pop r12                                      emulate
            pop rax                                      emulate
            mov rbp, rsp                                 emulate
            mov rbp, rsp                                 emulate
            mov r12, rdi                                 emulate
            mov edi, edi                                 emulate
            mov eax, edi                                 emulate
            mov r8d, eax                                 emulate
            pushfq                                       emulate only
        "#]],
    );
}

#[test]
fn pushes_pops_and_moves_without_memory_are_emulated_and_the_others_boosted() {
    check(
        "66c9 666a08 66b80100 6650 6a08 6800000080 ff7008 ff3500010000 6658 8f00 0fa0 0fa1 6689c3 88c3
         48c7c001000000 b801000000 48b80102030405060708 488b07 488907 4863c7
         a00102030405060708 8ed8 8cd0",
        expect![[r#"
            data16 leave                                 boost
            data16 push 8                                boost
            mov ax, 1                                    emulate
            push ax                                      boost
            push 8                                       emulate
            push 0xffffffff80000000                      emulate
            push qword ptr [rax+8]                       boost
            push qword ptr [0xffffffff8123466d]          boost
            pop ax                                       boost
            pop qword ptr [rax]                          boost
            push fs                                      boost
            pop fs                                       boost
            mov bx, ax                                   emulate
            mov bl, al                                   emulate
            mov rax, 1                                   emulate
            mov eax, 1                                   emulate
            mov rax, 0x807060504030201                   emulate
            mov rax, [rdi]                               boost
            mov [rdi], rax                               boost
            movsxd rax, edi                              boost
            mov al, [0x807060504030201]                  boost
            mov ds, ax                                   boost
            mov eax, ss                                  boost
        "#]],
    );
}

#[test]
fn arithmetic_on_registers_is_emulated_and_the_rest_boosted() {
    check(
        "4883ec28 4881ec00010000 4883c480 4881c400000080 4883e4f0 83ec08 6683ec08
         4883e808 4829c4 48830424ff 488d6424f8 4801d8 31c0 4885ff 480faf07 48d1e0
         f048ff07 f0480fc107 4887c3 488707 f0480fb10f f0480fc70f 480fc8 0f94c0 480f44c1
         65ff0500100000 65488b042500ad0100 3e488b07 67488b07",
        expect![[r#"
            sub rsp, 0x28                                emulate
            sub rsp, 0x100                               emulate
            add rsp, 0xffffffffffffff80                  emulate
            add rsp, 0xffffffff80000000                  emulate
            and rsp, 0xfffffffffffffff0                  emulate
            sub esp, 8                                   emulate
            sub sp, 8                                    emulate
            sub rax, 8                                   emulate
            sub rsp, rax                                 emulate
            add qword ptr [rsp], 0xffffffffffffffff      boost
            lea rsp, [rsp-8]                             emulate
            add rax, rbx                                 emulate
            xor eax, eax                                 emulate
            test rdi, rdi                                emulate
            imul rax, [rdi]                              boost
            shl rax, 1                                   boost
            lock inc qword ptr [rdi]                     boost
            lock xadd [rdi], rax                         boost
            xchg rbx, rax                                boost
            xchg [rdi], rax                              boost
            lock cmpxchg [rdi], rcx                      boost
            lock cmpxchg16b [rdi]                        boost
            bswap rax                                    boost
            sete al                                      boost
            cmove rax, rcx                               boost
            inc dword ptr gs:[0xffffffff8123556e]        boost
            mov rax, gs:[0x1ad00]                        boost
            mov rax, [rdi]                               boost
            mov rax, [edi]                               boost
        "#]],
    );
}

#[test]
fn branches_are_emulated_but_through_segments() {
    check(
        "e800000000 2ee800000000 67e800000000 e9fbffffff eb10 40e900000000 7410
         0f8410000000 2e7410 3e7410 c3 f3c3 c20800 ffd0 41ffd3 3effd0 ff5008 ff1500010000
         65ff142500010000 64ff2500010000 ffe0 ff24c5004080ff c9",
        expect![[r#"
            call 0xffffffff8123456c                      emulate only
            call 0xffffffff8123456d                      emulate only
            call 0xffffffff8123456d                      emulate only
            jmp 0xffffffff81234567                       emulate only
            jmp 0xffffffff81234579                       emulate only
            jmp 0xffffffff8123456d                       emulate only
            je 0xffffffff81234579                        emulate
            je 0xffffffff8123457d                        emulate
            hint-not-taken je 0xffffffff8123457a         emulate
            hint-taken je 0xffffffff8123457a             emulate
            ret                                          emulate only
            rep ret                                      emulate only
            ret 8                                        emulate only
            call rax                                     emulate only
            call r11                                     emulate only
            notrack call rax                             emulate only
            call qword ptr [rax+8]                       emulate only
            call qword ptr [0xffffffff8123466d]          emulate only
            call qword ptr gs:[0x100]                    refuse SegmentBranch
            jmp qword ptr fs:[0xffffffff8123466e]        refuse SegmentBranch
            jmp rax                                      emulate only
            jmp qword ptr [rax*8-0x7fc000]               emulate only
            leave                                        emulate
        "#]],
    );
}

#[test]
fn instructions_without_a_say_in_flow_are_boosted() {
    check(
        "f390 0fa2 0f31 0f01f9 0faee8 0faef0 0faef8 0f01ca 0f01cb fa fc fd 9f 9e 0f32
         0f33 0f0138 660f388200 0f09 0f06 0f01d0 0fc720 480fc728 480fae20 f3480faec0
         f3480faec8 0f0000 0f00d8 a4 48ab ac 660f6fc0 c5fdeff6 62f17c48100f 0f77 f20f10c1
         0f0d08 0f1808 0f0106 0f01ee 0fc7f0 0f01e8",
        expect![[r#"
            pause                                        boost
            cpuid                                        boost
            rdtsc                                        boost
            rdtscp                                       boost
            lfence                                       boost
            mfence                                       boost
            sfence                                       boost
            clac                                         boost
            stac                                         boost
            cli                                          emulate only
            cld                                          emulate
            std                                          emulate
            lahf                                         boost
            sahf                                         boost
            rdmsr                                        boost
            rdpmc                                        boost
            invlpg [rax]                                 boost
            invpcid rax, [rax]                           boost
            wbinvd                                       boost
            clts                                         boost
            xgetbv                                       boost
            xsavec [rax]                                 boost
            xsaves64 [rax]                               boost
            xsave64 [rax]                                boost
            rdfsbase rax                                 boost
            rdgsbase rax                                 boost
            sldt [rax]                                   boost
            ltr ax                                       refuse DescriptorTable
            movsb [rdi], [rsi]                           boost
            stosq [rdi]                                  boost
            lodsb [rsi]                                  boost
            movdqa xmm0, xmm0                            boost
            vpxor ymm6, ymm0, ymm6                       boost
            vmovups zmm1, [rdi]                          boost
            emms                                         boost
            movsd xmm0, xmm1                             boost
            prefetchw [rax]                              boost
            prefetcht0 [rax]                             boost
            sgdt [rsi]                                   boost
            rdpkru                                       boost
            rdrand eax                                   boost
            serialize                                    boost
        "#]],
    );
}

#[test]
fn traps_and_transfers_of_the_processor_are_refused() {
    check(
        "cc f1 cd80 cd03 0f0b 0fb9cc 0fffc0 f4 fb 9d 669d 669c cf 48cf 66cf 0f05 0f07
         480f07 0f34 0f35 ff28 48ff28 ff18 cb 48cb ca0800 f30f01ec 0faa",
        expect![[r#"
            int3                                         refuse Breakpoint
            int1                                         refuse Breakpoint
            int 0x80                                     refuse SoftwareInterrupt
            int 3                                        refuse SoftwareInterrupt
            ud2                                          refuse Bug
            ud1 ecx, esp                                 refuse Bug
            ud0 eax, eax                                 refuse Bug
            hlt                                          refuse Halt
            sti                                          emulate only
            popfq                                        emulate only
            popf                                         refuse NarrowFlags
            pushf                                        refuse NarrowFlags
            iretd                                        refuse InterruptReturn
            iretq                                        refuse InterruptReturn
            iret                                         refuse InterruptReturn
            syscall                                      refuse SystemCall
            sysret                                       refuse SystemCall
            sysretq                                      refuse SystemCall
            sysenter                                     refuse SystemCall
            sysexit                                      refuse SystemCall
            jmp far fword ptr [rax]                      refuse FarTransfer
            jmp far tbyte ptr [rax]                      refuse FarTransfer
            call far fword ptr [rax]                     refuse FarTransfer
            ret far                                      refuse FarTransfer
            data64 ret far                               refuse FarTransfer
            ret far 8                                    refuse FarTransfer
            uiret                                        refuse InterruptReturn
            rsm                                          refuse InterruptReturn
        "#]],
    );
}

#[test]
fn system_state_is_boosted_unless_exceptions_depend_on_it() {
    check(
        "8ed0 480fb200 0f20c0 0f22d8 440f20c0 440f22c0 0f21f8 0f23f8 0f01f0 0f06 0f01d1
         0f0110 0f0118 0f0108 0f0100 0f00d0 0f00d8 0f30 0f01c6 0f01f8 f3480faed8 f3480faed0 f20f00f0",
        expect![[r#"
            mov ss, ax                                   refuse LoadStackSegment
            lss rax, [rax]                               refuse LoadStackSegment
            mov rax, cr0                                 boost
            mov cr3, rax                                 boost
            mov rax, cr8                                 boost
            mov cr8, rax                                 boost
            mov rax, dr7                                 boost
            mov dr7, rax                                 boost
            lmsw ax                                      boost
            clts                                         boost
            xsetbv                                       boost
            lgdt [rax]                                   refuse DescriptorTable
            lidt [rax]                                   refuse DescriptorTable
            sidt [rax]                                   refuse DescriptorTable
            sgdt [rax]                                   boost
            lldt ax                                      boost
            ltr ax                                       refuse DescriptorTable
            wrmsr                                        boost
            wrmsrns                                      boost
            swapgs                                       refuse SegmentBase
            wrgsbase rax                                 refuse SegmentBase
            wrfsbase rax                                 refuse SegmentBase
            lkgs eax                                     refuse SegmentBase
        "#]],
    );
}

#[test]
fn strings_and_ports_are_boosted_but_not_what_relies_on_the_instruction_before() {
    check(
        "e4f4 ec ef e6f4 6c 6d 6e f36f f3a4 f348a5 f348ab f2ae f3a6 f2a4 f30fa7c0 e2fe
         e0fe e3fe 67e3fe c7f800000000 c6f800 0f01d5 f20f01e8 0f01c8 0f01c9 0f01fa
         f30faef0 660faef0 c8000000",
        expect![[r#"
            in al, 0xf4                                  boost
            in al, dx                                    boost
            out dx, eax                                  boost
            out 0xf4, al                                 boost
            insb [rdi], dx                               boost
            insd [rdi], dx                               boost
            outsb dx, [rsi]                              boost
            rep outsd dx, [rsi]                          boost
            rep movsb [rdi], [rsi]                       boost
            rep movsq [rdi], [rsi]                       boost
            rep stosq [rdi]                              boost
            repne scasb [rdi]                            boost
            repe cmpsb [rsi], [rdi]                      boost
            repne movsb [rdi], [rsi]                     boost
            rep xstore                                   boost
            loop 0xffffffff81234567                      emulate only
            loopne 0xffffffff81234567                    emulate only
            jrcxz 0xffffffff81234567                     emulate only
            jecxz 0xffffffff81234568                     emulate only
            xbegin 0xffffffff8123456d                    refuse Transaction
            xabort 0                                     refuse Transaction
            xend                                         refuse Transaction
            xsusldtrk                                    refuse Transaction
            monitor                                      boost
            mwait                                        refuse MonitorWait
            monitorx                                     boost
            umonitor rax                                 boost
            tpause eax                                   boost
            enter 0, 0                                   boost
        "#]],
    );
}

#[test]
fn virtualization_and_shadow_stacks_are_refused() {
    check(
        "0f01c1 0f01c2 0f01c4 0f01d9 0f01d8 0f01dc 0f78c8 f30f01d9 0f01cf 0f01d7 0f37
         0f01c5 f30f01ff f30f01ea f3480faee8 f3480f1ec8",
        expect![[r#"
            vmcall                                       refuse Virtualization
            vmlaunch                                     refuse Virtualization
            vmxoff                                       refuse Virtualization
            vmmcall                                      refuse Virtualization
            vmrun rax                                    refuse Virtualization
            stgi                                         refuse Virtualization
            vmread rax, rcx                              refuse Virtualization
            vmgexit                                      refuse Virtualization
            encls                                        refuse Virtualization
            enclu                                        refuse Virtualization
            getsec                                       refuse Virtualization
            pconfig                                      refuse Virtualization
            psmash                                       refuse Virtualization
            saveprevssp                                  refuse ShadowStack
            incsspq rax                                  refuse ShadowStack
            rdsspq rax                                   boost
        "#]],
    );
}

#[test]
fn privileged_instructions_without_a_rule_are_boosted() {
    check(
        "0f08 f30f3af0c000 f30f38f80f",
        expect![[r#"
            invd                                         boost
            hreset 0                                     boost
            enqcmds rcx, [rdi]                           boost
        "#]],
    );
}

#[test]
fn x87_instructions_that_record_their_address_are_refused() {
    check(
        "d9c0 de0f db2f dfe0 dbe3 dbe2 9b d92f d93f dd37 dd27 480fae07",
        expect![[r#"
            fld st, st(0)                                refuse X87Pointer
            fimul st, word ptr [rdi]                     refuse X87Pointer
            fld st, tbyte ptr [rdi]                      refuse X87Pointer
            fnstsw ax                                    boost
            fninit                                       boost
            fnclex                                       boost
            fwait                                        boost
            fldcw [rdi]                                  boost
            fnstcw [rdi]                                 boost
            fnsave [rdi]                                 boost
            frstor [rdi]                                 boost
            fxsave64 [rdi]                               boost
        "#]],
    );
}

#[test]
fn prefixes_that_processors_disagree_about_are_refused() {
    check(
        "66e800000000 66e900000000 6674fe 66c3 66ffd0 f2c3 f2e800000000 f2ffe0 f374fe
         f3ffd0 4866c3 67488b0500000000 67488d0500000000",
        expect![[r#"
            call 0xffffffff8123456d                      refuse OddPrefix
            jmp 0xffffffff8123456d                       refuse OddPrefix
            je 0xffffffff81234568                        refuse OddPrefix
            ret                                          refuse OddPrefix
            call rax                                     refuse OddPrefix
            bnd ret                                      refuse OddPrefix
            bnd call 0xffffffff8123456d                  refuse OddPrefix
            bnd jmp rax                                  refuse OddPrefix
            je 0xffffffff81234568                        refuse OddPrefix
            call rax                                     refuse OddPrefix
            ret                                          refuse OddPrefix
            mov rax, [0x8123456f]                        refuse EipRelative
            lea rax, [0x8123456f]                        refuse EipRelative
        "#]],
    );
}

#[test]
fn what_is_no_instruction_is_refused() {
    check(
        "06 0f04 f090 f04889e5 d6 c4e2 e80000 48",
        expect![[r#"
            (bad) 06                                     refuse Truncated { have: 1 }
            (bad) 0f 04                                  refuse Truncated { have: 2 }
            (bad) f0 90                                  refuse Undecodable
            (bad) f0 48 89 e5                            refuse Undecodable
            (bad) d6                                     refuse Truncated { have: 1 }
            (bad) c4 e2                                  refuse Truncated { have: 2 }
            (bad) e8 00 00                               refuse Truncated { have: 3 }
            (bad) 48                                     refuse Truncated { have: 1 }
        "#]],
    );
    assert_eq!(classify(&[], AT), Err(Refusal::Truncated { have: 0 }));
    let endless = [0x66; 20];
    assert_eq!(classify(&endless, AT), Err(Refusal::Undecodable));
}

#[test]
fn endbr64_is_known_by_its_bytes() {
    for hex in ["f30f1efa 55", "660f1f00 55", "0f1f40d6 55"] {
        assert!(is_endbr64(&bytes(hex)), "{hex}");
    }
    for hex in ["", "f30f1e", "f30f1efb", "55f30f1efa", "0f1f4000", "0f1f40"] {
        assert!(!is_endbr64(&bytes(hex)), "{hex}");
    }
    assert!(is_nop4(&bytes("0f1f4000")) && !is_nop4(&bytes("0f1f40")));
}

#[test]
fn displaced_instructions_can_be_shared_by_threads() {
    fn is_shareable<T: Clone + std::fmt::Debug + Send + Sync>() {}
    is_shareable::<Displaced>();
}

proptest! {
    #![proptest_config(at_least(20_000))]

    #[test]
    fn garbage_never_panics_anywhere(
        code in prop::collection::vec(any::<u8>(), 0..24),
        opcode in prop_oneof![
            Just(vec![]), Just(vec![0x0f]), Just(vec![0xf3, 0x0f]), Just(vec![0xc4]), Just(vec![0x62])
        ],
        at in any::<u64>(),
        slot in any::<u64>(),
        words in any::<[u64; 8]>(),
    ) {
        let code = [opcode, code].concat();
        let (at, slot) = (Gva(at), Gva(slot));
        let _ = text(&code, at);
        let _ = boundary(&code, at, slot);
        let Ok(displaced) = classify(&code, at) else { return Ok(()) };
        prop_assert_eq!(Some(displaced.bytes().len()), instruction_len(&code, at));
        prop_assert_eq!(displaced.bytes(), &code[..displaced.bytes().len()]);
        let mut regs = Regs { rsp: words[0], rip: words[1], rflags: words[2], ..Regs::default() };
        if let Action::Emulate(_) = displaced.action() {
            let before = regs;
            if displaced.emulate(&mut regs, &mut Words::new(words[0] & !0xff, &words)).is_err() {
                prop_assert_eq!(regs, before);
            }
        }
        for copy in [displaced.boosted(slot), displaced.trapped(slot)].into_iter().flatten() {
            for offset in 0..SLOT_SIZE as u64 {
                let rip = slot.wrapping_add(offset);
                let _ = displaced.in_place(&copy, rip);
                let _ = displaced.trap_end(&copy, rip);
            }
            prop_assert_eq!(displaced.in_place(&copy, slot), Some(at));
        }
    }
}
